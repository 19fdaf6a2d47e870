"""A task that needs no files: points around class centres, for trying out a cluster and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field
from torch import nn

from raytrain_app.task import Columns, ModelOptions, Rows, Task

FEATURES, CLASSES, TRAIN_ROWS, TEST_ROWS = 16, 4, 1000, 250


class Linear(ModelOptions):
    """Softmax regression."""


class Mlp(ModelOptions):
    """One hidden layer, with dropout and BatchNorm if asked."""

    hidden: int = Field(32, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    batch_norm: bool = False


class Synthetic(Task):
    """Gaussian clouds: 16 float32 features, 4 classes, 1,000 training and 250 test rows."""

    columns = Columns(shape=(FEATURES,), dtype="float32", num_classes=CLASSES)
    models = {"linear": Linear, "mlp": Mlp}
    default_source = "synthetic"

    def generate(self, source: str) -> Mapping[str, Rows] | None:
        if source != "synthetic":
            return None
        rng = np.random.Generator(np.random.PCG64(0))
        centres = rng.normal(size=(CLASSES, FEATURES))
        labels = rng.integers(0, CLASSES, TRAIN_ROWS + TEST_ROWS)
        points = (centres[labels] + rng.normal(size=(len(labels), FEATURES))).astype(np.float32)
        return {"train": (points[:TRAIN_ROWS], labels[:TRAIN_ROWS]), "test": (points[TRAIN_ROWS:], labels[TRAIN_ROWS:])}

    def torch_model(self, name: str, options: Any) -> nn.Module:
        if name == "linear":
            return nn.Linear(FEATURES, CLASSES)
        norm = [nn.BatchNorm1d(options.hidden)] if options.batch_norm else []
        return nn.Sequential(
            nn.Linear(FEATURES, options.hidden), *norm, nn.ReLU(), nn.Dropout(options.dropout), nn.Linear(options.hidden, CLASSES)
        )

    def keras_model(self, keras: Any, name: str, options: Any) -> Any:
        layers = keras.layers
        if name == "linear":
            return keras.Sequential([layers.Input((FEATURES,)), layers.Dense(CLASSES)])
        norm = [layers.BatchNormalization(momentum=0.9, epsilon=1e-5)] if options.batch_norm else []
        return keras.Sequential(
            [
                layers.Input((FEATURES,)),
                layers.Dense(options.hidden),
                *norm,
                layers.ReLU(),
                layers.Dropout(options.dropout),
                layers.Dense(CLASSES),
            ]
        )


TASK = Synthetic()
