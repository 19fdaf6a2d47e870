"""Recorded shards have the bits of shards.

On a GPU CUDA records. Elsewhere `Replayed` does: it keeps the operations on tensors that forward and backward come down to, and
does them again on the same memory, without any of the Python code around them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raytrain_app.errors import TrainingError
from raytrain_app.learners.graphs import Compute, Graphs, host_generators, same_bits
from raytrain_app.learners.torch import TorchLearner
from raytrain_app.learners.torch_parts import prepare_process
from tests.unit.learners.test_torch import CPU, Given, dense, make_job, normed, rows

DEVICES = [
    CPU,
    pytest.param(torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")),
]
DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1),
    "numpy": lambda: np.random.rand(),  # noqa: NPY002 - what tasks may do
    "python": random.random,
}
Operation = tuple[Any, Sequence[Any], dict[str, Any], Any]


class Replayed(TorchDispatchMode):
    """A recording of operations on a CPU."""

    def __init__(self, compute: Compute, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[Operation] = []
        self._x, self._y = x.clone(), y.clone()
        with self:
            self._results = compute(self._x, self._y)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    def launch(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        self._x.copy_(x)
        self._y.copy_(y)
        with torch.no_grad():
            for func, args, kwargs, result in self._operations:
                for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
        return [result.clone() for result in self._results]


class ReplayedGraphs(Graphs):
    def _capture(self, rows: torch.Tensor, labels: torch.Tensor) -> Any:
        return Replayed(self._compute, rows, labels)


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    prepare_process(make_job())
    if request.param == CPU:  # whose own generator is the first one
        monkeypatch.setattr("raytrain_app.learners.graphs.host_generators", lambda: host_generators()[1:])
    chosen: torch.device = request.param
    return chosen


def make_learner(
    device: torch.device, *, graphs: bool, model: Callable[[], nn.Module] = dense, task: type[Given] = Given
) -> TorchLearner:
    job = make_job(train={"cuda_graphs": graphs}, scaling={"resources_per_worker": {"GPU": 1}})
    learner = TorchLearner(job, task(model), device)
    if graphs and device == CPU:
        buffers = (*learner._buffers, *learner._counters)
        learner._graphs = ReplayedGraphs(learner._compute, learner._flat, lambda: [buffer.value for buffer in buffers])
    return learner


def train(learner: TorchLearner) -> list[torch.Tensor]:
    """Vector, counters and scores of shards of two sizes, with an update after each and a saved state in between."""
    found = []
    for step, count in enumerate((6, 6, 4, 6, 4)):
        shard = learner.shard(*rows(count, seed=step), seed=step)
        found += [shard.vector.clone(), shard.counters.clone(), shard.scores.clone()]
        learner.apply(shard.vector / count, shard.counters, 0.1)
        learner.evaluate(*rows(count))
        if step == 3:
            learner.load(learner.state())
    return found


@pytest.mark.parametrize("model", [dense, normed])
def test_bits_are_those_of_shards_that_are_not_recorded(device: torch.device, model: Any) -> None:
    """Also with dropout, BatchNorm, a last batch of another size, and evaluation and loading in between."""
    one, other = make_learner(device, graphs=False, model=model), make_learner(device, graphs=True, model=model)
    assert all(map(same_bits, train(one), train(other)))
    assert one.state().to_bytes() == other.state().to_bytes()


def test_shards_are_recorded_once_for_each_size(device: torch.device) -> None:
    calls = []

    class Counting(Given):
        def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return x

    learner = make_learner(device, graphs=True, task=Counting)
    for count in (6, 4):
        learner.shard(*rows(count), seed=0)
    before = list(calls)
    train(learner)
    assert set(before) == {6, 4}
    assert calls == before


@pytest.mark.parametrize("kind", DRAWS)
def test_what_draws_on_the_host_is_refused(device: torch.device, kind: str) -> None:
    class Drawing(Given):
        def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
            DRAWS[kind]()
            return x

    if kind == "torch" and device == CPU:
        pytest.skip("a CPU's own generator is what draws there on the device")
    with pytest.raises(TrainingError, match="random numbers on the host"):
        make_learner(device, graphs=True, task=Drawing).shard(*rows(4), seed=0)


def test_a_model_that_replaces_its_buffers_is_refused(device: torch.device) -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = dense()
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + 1
            outputs: torch.Tensor = self.dense(x)
            return outputs

    with pytest.raises(TrainingError, match="another tensor in the place of a buffer"):
        make_learner(device, graphs=True, model=Replacing).shard(*rows(4), seed=0)


def test_a_model_that_counts_in_python_is_refused(device: torch.device) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.calls = dense(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            outputs: torch.Tensor = self.dense(x) / self.calls
            return outputs

    with pytest.raises(TrainingError, match="other bits"):
        make_learner(device, graphs=True, model=Counting).shard(*rows(4), seed=0)


class Waiting(Given):
    """Asks the host about a value on the GPU."""

    def torch_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().torch_loss(outputs, y) * float(outputs.sum() > 0)


def record_what_waits() -> None:
    device = torch.device("cuda")
    prepare_process(make_job())
    with pytest.raises(TrainingError, match=r"cannot be recorded: .*captur"):
        make_learner(device, graphs=True, task=Waiting).shard(*rows(4), seed=0)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_what_waits_for_the_gpu_is_refused() -> None:
    """In a process of its own, whose CUDA is not to be used after that."""
    process = get_context("spawn").Process(target=record_what_waits)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_the_first_cause_is_told() -> None:
    class Failing(Graphs):
        def _capture(self, rows: torch.Tensor, labels: torch.Tensor) -> Any:
            try:
                raise RuntimeError("the cause\nand where it was")
            finally:
                raise RuntimeError("what came of it")

    x = torch.zeros(2)
    with pytest.raises(TrainingError, match=r"cannot be recorded: the cause\. Set train\.cuda_graphs: false"):
        Failing(lambda x, y: (x,), x, list)(x, x, lambda: None)


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_on_the_host_are_seen(kind: str) -> None:
    before = host_generators()
    assert host_generators() == before
    DRAWS[kind]()
    assert host_generators() != before


def test_bits_and_not_values_are_compared() -> None:
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_what_was_trained_on_a_gpu_is_evaluated_on_a_cpu() -> None:
    job = make_job(train={"cuda_graphs": True}, scaling={"resources_per_worker": {"GPU": 1}})
    assert TorchLearner(job, Given(dense), CPU).evaluate(*rows(3)).shape == (2,)
