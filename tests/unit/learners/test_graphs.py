"""Recorded shards have the bits of shards; most of it needs a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raytrain_app.errors import TrainingError
from raytrain_app.learners.graphs import host_generators, same_bits
from raytrain_app.learners.torch import TorchLearner
from tests.unit.learners.test_torch import CPU, Given, dense, make_job, normed, rows

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1),
    "numpy": lambda: np.random.rand(),  # noqa: NPY002 - what tasks may do
    "python": random.random,
}


def make_learner(graphs: bool, model: Callable[[], nn.Module] = dense, task: type[Given] = Given) -> TorchLearner:
    job = make_job(train={"cuda_graphs": graphs}, scaling={"resources_per_worker": {"GPU": 1}})
    return TorchLearner(job, task(model), torch.device("cuda"))


def train(learner: TorchLearner) -> list[torch.Tensor]:
    """Vector, counters and scores of shards of two sizes, with an update after each."""
    found = []
    for step, count in enumerate((6, 6, 4, 6, 4)):
        shard = learner.shard(*rows(count, seed=step), seed=step)
        found += [shard.vector.clone(), shard.counters.clone(), shard.scores.clone()]
        learner.apply(shard.vector / count, shard.counters, 0.1)
    return found


@needs_gpu
@pytest.mark.parametrize("model", [dense, normed])
def test_bits_are_those_of_shards_that_are_not_recorded(model: Any) -> None:
    """Also with dropout, BatchNorm and a last batch of another size."""
    one, other = make_learner(False, model), make_learner(True, model)
    assert all(map(same_bits, train(one), train(other)))
    assert one.state().to_bytes() == other.state().to_bytes()


@needs_gpu
@pytest.mark.parametrize("kind", DRAWS)
def test_what_draws_on_the_host_is_refused(kind: str) -> None:
    class Drawing(Given):
        def torch_augment(self, inputs: torch.Tensor) -> torch.Tensor:
            DRAWS[kind]()
            return inputs

    with pytest.raises(TrainingError, match="random numbers on the host"):
        make_learner(True, task=Drawing).shard(*rows(4), seed=0)


@needs_gpu
def test_what_waits_for_the_gpu_is_refused() -> None:
    class Waiting(Given):
        def torch_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().torch_loss(outputs, y) * float(outputs.sum() > 0)

    with pytest.raises(TrainingError, match="cannot be recorded"):
        make_learner(True, task=Waiting).shard(*rows(4), seed=0)


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_on_the_host_are_seen(kind: str) -> None:
    before = host_generators()
    assert host_generators() == before
    DRAWS[kind]()
    assert host_generators() != before


def test_bits_and_not_values_are_compared() -> None:
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_evaluation_on_a_cpu_needs_no_graphs() -> None:
    """A job that was trained on a GPU is evaluated anywhere."""
    job = make_job(train={"cuda_graphs": True}, scaling={"resources_per_worker": {"GPU": 1}})
    assert TorchLearner(job, Given(dense), CPU).evaluate(*rows(3)).shape == (2,)
