"""A task around whatever Keras model a test brings, and one worker's training with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from raytrain_app.elastic.reduce import Reducer, Total
from raytrain_app.job import Job, job_from_dict
from raytrain_app.task import Columns, ModelOptions, Task

WHY = "TensorFlow is not installed; pip install 'raytrain-app[tensorflow]'"
tf: Any = pytest.importorskip("tensorflow", reason=WHY)
keras: Any = pytest.importorskip("keras", reason=WHY)

FEATURES, CLASSES, SHARDS = 7, 3, 4


class Net(ModelOptions):
    """The one model of `Given`."""


class Given(Task):
    """Rows of seven float features around a model; what else differs is given as functions of the same name."""

    columns = Columns(shape=(FEATURES,), dtype="float32", num_classes=CLASSES)
    models = {"net": Net}

    def __init__(self, make: Callable[[Any], Any] | None = None, **overrides: Any) -> None:
        self.make = make or dense
        vars(self).update(overrides)

    def keras_model(self, keras: Any, name: str, options: Any) -> Any:
        return self.make(keras)


def dense(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential([layers.Input((FEATURES,)), layers.Dense(5, activation="tanh"), layers.Dense(CLASSES)])


def normed(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((FEATURES,)),
            layers.Dense(6),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.5),
            layers.Dense(CLASSES),
        ]
    )


def make_job(**sections: Any) -> Job:
    start: dict[str, Any] = {"name": "unit", "task": "given", "framework": "tensorflow", "model": {"name": "net"}}
    return job_from_dict({**start, **sections})


def make_learner(make: Any = None, sections: dict[str, Any] | None = None, directory: str | None = None, **overrides: Any) -> Any:
    """A learner of the model that `make` builds, in a job with these sections, with these methods of the task replaced."""
    from raytrain_app.learners.keras import KerasLearner

    return KerasLearner(make_job(**(sections or {})), Given(make, **overrides), directory)


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.normal(size=(count, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, count)


def reduce(learner: Any, x: np.ndarray, y: np.ndarray, step: int = 0) -> Total:
    """One batch on one worker with four shards."""
    parts = [slice(low, high) for low, high in pairwise(len(y) * shard // SHARDS for shard in range(SHARDS + 1))]
    reducer = Reducer(0, 1, SHARDS, learner.layout, 1, torch.device("cpu"))
    return reducer.reduce(lambda v, _: learner.shard(x[parts[v]], y[parts[v]], 100 * step + v), len(y), min(len(y), SHARDS), [0])


def train(learner: Any, steps: Sequence[int], lr: float = 0.1) -> None:
    for step in steps:
        total = reduce(learner, *rows(10, seed=step), step=step)
        learner.apply(total.mean, total.counters, lr)
