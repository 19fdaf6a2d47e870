"""The fast step of PyTorch on several workers: one message has gradients, scores and flags of all of them."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from raytrain_app.elastic.exchange import PeerLost, disconnect
from raytrain_app.state import Arrays
from tests.unit.elastic.test_reduce import run_workers
from tests.unit.learners.test_torch import CLASSES, FEATURES, dense, make_learner, rows

WORKERS, ROWS = 3, 10
FLAGS = [[0, 1, 0], [0, 1, 0], [0, 0, 1]]
"""Of each worker."""
SPANS = [slice(0, 4), slice(4, 7), slice(7, 10)]
"""Rows of each worker."""


class WithUnused(nn.Sequential):
    """A model with a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__(*dense())
        self.unused = nn.Parameter(torch.ones(2))


class Large(nn.Sequential):
    """A model whose gradients go in several buckets, which DistributedDataParallel arranges anew after the first step."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 500), *(nn.Linear(500, 500) for _ in range(8)), nn.Linear(500, CLASSES))


class Counting(nn.Sequential):
    """A model that notes the buffers with which its forward passes begin, and leaves others."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__(*dense())
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.seen: list[torch.Tensor] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.cat([self.mean, self.count]))
        self.mean, self.count = input.mean(0), self.count + len(input)
        return super().forward(input)  # type: ignore[no-any-return, no-untyped-call]


MODELS = {"all": dense, "unused": WithUnused, "large": Large, "counting": Counting}


def worker(rank: int, folder: Path) -> None:
    """Takes two steps with each model, and leaves what it was told and its weights."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORKERS)
    for name, model in MODELS.items():
        learner = make_learner(model, optimizer={"name": "sgd"})
        learner.connect(WORKERS, len(FLAGS[rank]))
        for step in range(2):
            x, y = rows(ROWS, seed=step)
            sums = learner.fast_shard(x[SPANS[rank]], y[SPANS[rank]], step, ROWS, FLAGS[rank])
            learner.fast_apply(0.1)
        seen = learner.model.seen if isinstance(learner.model, Counting) else []
        (folder / f"{name}-{rank}").write_bytes(pickle.dumps((sums, learner.weights(), seen)))
        dist.barrier()
        learner.connect(1, 0)  # lets go of the process group: its threads must not outlive the interpreter
    disconnect()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what all workers left."""
    folder = tmp_path_factory.mktemp("fast")
    assert run_workers(worker, WORKERS, folder) == [0] * WORKERS
    return folder


def left_by_all(name: str, results: Path) -> list[tuple[list[float], Arrays, list[torch.Tensor]]]:
    """Sums of the last step, weights, and buffers that were seen, by rank."""
    return [pickle.loads((results / f"{name}-{rank}").read_bytes()) for rank in range(WORKERS)]


@pytest.mark.parametrize("name", MODELS)
def test_all_workers_together_are_one(name: str, results: Path) -> None:
    """The same scores and weights as one worker with all the rows, and every flag that anybody has."""
    alone = make_learner(MODELS[name], optimizer={"name": "sgd"})
    alone.connect(1, 0)
    for step in range(2):
        scores = alone.fast_shard(*rows(ROWS, seed=step), step, ROWS, [])
        alone.fast_apply(0.1)
    found = left_by_all(name, results)
    for sums, mine, _ in found:
        assert sums[:2] == pytest.approx(scores, rel=1e-5)
        assert [bool(flag) for flag in sums[2:]] == [False, True, True]
        for key, weights in alone.weights().items():
            np.testing.assert_allclose(mine[key], weights, rtol=1e-4, atol=1e-6)
            assert np.array_equal(mine[key], found[0][1][key])


def test_all_begin_with_the_buffers_of_the_first_one(results: Path) -> None:
    seen = [buffers[-2:] for _, _, buffers in left_by_all("counting", results)]
    first, second = seen[0]
    assert (first == 0).all()
    assert second.tolist() == pytest.approx([*rows(ROWS)[0][SPANS[0]].mean(0), SPANS[0].stop])
    assert all(torch.equal(mine[1], second) for mine in seen)


def failing_worker(rank: int, kind: str, folder: Path) -> None:
    """In the second step rank 1 dies, or its model fails, when some of its gradients have come."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    learner = make_learner(optimizer={"name": "sgd"})
    learner.connect(2, 1)
    learner.fast_shard(*rows(4, seed=rank), 0, 8, [0])
    learner.fast_apply(0.1)

    def strike(gradient: torch.Tensor) -> None:
        if kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the task's own")

    if rank == 1:
        next(learner.model.parameters()).register_hook(strike)
    try:
        learner.fast_shard(*rows(4, seed=rank), 1, 8, [0])
    except PeerLost:
        (folder / f"{rank}-lost").touch()
    except RuntimeError as error:
        (folder / f"{rank}-{error}").touch()
    learner.connect(1, 0)
    disconnect()


@pytest.mark.parametrize("kind", ["dies", "fails"])
def test_a_worker_that_fails_in_backward(kind: str, tmp_path: Path) -> None:
    assert run_workers(failing_worker, 2, kind, tmp_path) == [0, -9 if kind == "dies" else 0]
    left = {path.name for path in tmp_path.iterdir()} - {"rendezvous"}
    assert left == ({"0-lost"} if kind == "dies" else {"0-lost", "1-the task's own"})
