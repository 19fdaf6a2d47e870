"""The PyTorch learner against plain PyTorch: the same gradients and updates, and the same bits wherever a shard lies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from raytrain_app.elastic.reduce import Reducer, Total
from raytrain_app.errors import JobError, StorageError
from raytrain_app.job import Job, job_from_dict
from raytrain_app.learners.torch import TorchLearner
from raytrain_app.learners.torch_parts import prepare_process
from raytrain_app.state import TrainState
from raytrain_app.task import Columns, ModelOptions, Task

CPU = torch.device("cpu")
FEATURES, CLASSES, SHARDS = 7, 3, 4


class Net(ModelOptions):
    """The one model of `Given`."""


class Given(Task):
    """A task of rows with 7 float features around a module that the test brings."""

    columns = Columns(shape=(FEATURES,), dtype="float32", num_classes=CLASSES)
    models = {"net": Net}

    def __init__(self, make: Any) -> None:
        self.make = make

    def torch_model(self, name: str, options: Any) -> nn.Module:
        module: nn.Module = self.make()
        return module


class Noisy(Given):
    """Adds noise from all three generators that a task may use."""

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x) + float(np.random.rand()) + random.random()  # noqa: NPY002


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, CLASSES))


def make_job(**sections: Any) -> Job:
    return job_from_dict({"name": "unit", "task": "given", "model": {"name": "net"}, **sections})


def make_learner(make: Any = dense, task: type[Given] = Given, **sections: Any) -> TorchLearner:
    return TorchLearner(make_job(**sections), task(make), CPU)


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.normal(size=(count, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, count)


def reduce(learner: TorchLearner, x: np.ndarray, y: np.ndarray, step: int = 0) -> Total:
    """One batch on one worker with four shards."""
    bounds = [len(y) * shard // SHARDS for shard in range(SHARDS + 1)]
    parts = [slice(low, high) for low, high in pairwise(bounds)]
    reducer = Reducer(0, 1, SHARDS, learner.layout, 1, CPU)
    return reducer.reduce(lambda v, _: learner.shard(x[parts[v]], y[parts[v]], 100 * step + v), len(y), min(len(y), SHARDS), [0])


def train(learner: TorchLearner, steps: int, lr: float = 0.1, first: int = 0) -> None:
    for step in range(first, first + steps):
        total = reduce(learner, *rows(10, seed=step), step=step)
        learner.apply(total.mean, total.counters, lr)


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    threads = torch.get_num_threads()
    prepare_process(make_job())
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({"name": "sgd"}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "adam": ({"name": "adam", "betas": [0.8, 0.99]}, lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.99))),
    "adamw": ({"name": "adamw"}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01)),
}


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_plain_pytorch_does(optimizer: str, clip_norm: float | None) -> None:
    options, make_plain = OPTIMIZERS[optimizer]
    learner = make_learner(optimizer=options, train={"clip_norm": clip_norm})
    plain = dense()
    plain.load_state_dict({name: torch.from_numpy(w) for name, w in learner.weights().items()})
    plain_optimizer = make_plain(plain.parameters())
    for step in range(5):
        x, y = rows(10, seed=step)
        total = reduce(learner, x, y, step)
        learner.apply(total.mean, total.counters, 0.1)
        outputs = plain(torch.from_numpy(x))
        loss = nn.functional.cross_entropy(outputs, torch.from_numpy(y))
        plain_optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
            assert step or norm > clip_norm
        plain_optimizer.step()
        assert total.loss / 10 == pytest.approx(loss.item(), rel=1e-5)
        assert total.correct == int((outputs.argmax(1) == torch.from_numpy(y)).sum())
    for name, weights in learner.weights().items():
        np.testing.assert_allclose(weights, plain.state_dict()[name].numpy(), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_mean_gradient_is_only_read(optimizer: str) -> None:
    """This worker's part of it may still be on its way to the others."""
    learner = make_learner(normed, optimizer=OPTIMIZERS[optimizer][0], train={"clip_norm": 0.001})
    for step in range(2):
        total = reduce(learner, *rows(10, seed=step), step=step)
        before = total.mean.clone()
        learner.apply(total.mean, total.counters, 0.1)
        assert torch.equal(total.mean, before)


@pytest.mark.parametrize("offset", range(16))
def test_bits_do_not_depend_on_where_the_rows_lie_in_memory(offset: int) -> None:
    learner = make_learner(normed)
    x, y = rows(9)
    memory = np.empty(x.size + 32, np.float32)
    start = -memory.ctypes.data // 4 % 16 + offset
    moved = memory[start : start + x.size].reshape(x.shape)
    moved[:] = x
    assert moved.ctypes.data % 64 == 4 * offset
    first = learner.shard(x.copy(), y, 3)
    vector, scores = first.vector.clone(), first.scores.clone()
    second = learner.shard(moved, y, 3)
    assert torch.equal(second.vector, vector)
    assert torch.equal(second.scores, scores)
    assert torch.equal(learner.evaluate(moved, y), learner.evaluate(x.copy(), y))


def test_a_shards_randomness_is_its_seeds_alone() -> None:
    learner = make_learner(normed, Noisy)
    x, y = rows(8)
    first = learner.shard(x, y, 5).vector.clone()
    other = learner.shard(x, y, 6).vector.clone()
    torch.rand(3), random.random()
    assert torch.equal(learner.shard(x, y, 5).vector, first)
    assert not torch.equal(first, other)


def test_every_shard_starts_from_the_steps_buffers_and_their_mean_is_taken_over() -> None:
    learner = make_learner(normed)
    x, y = rows(12)
    total = reduce(learner, x, y)
    linear, norm, *_ = learner.model.children()
    assert isinstance(norm, nn.BatchNorm1d)
    means = [0.1 * linear(torch.from_numpy(x[first : first + 3])).mean(0) for first in range(0, 12, 3)]
    learner.apply(total.mean, total.counters, 0.1)
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0))
    assert norm.num_batches_tracked.item() == 1


def test_shards_without_rows_change_nothing() -> None:
    learner = make_learner(normed)
    x, y = rows(1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):  # PyTorch's own rule for a lone row
        reduce(learner, x, y)
    shard = learner.shard(x[:0], y[:0], 0)
    assert not shard.vector.any()
    assert not shard.scores.any()
    assert not shard.counters.any()
    plain = make_learner(dense)
    x, y = rows(2)
    total = reduce(plain, x, y)  # two shards of one row, two of none
    whole = plain.shard(x, y, 0)
    torch.testing.assert_close(total.mean, whole.vector / 2)
    assert total.loss == pytest.approx(whole.scores[0].item())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_goes_through_bytes_and_training_goes_on_with_the_same_bits(optimizer: str) -> None:
    def make() -> TorchLearner:
        return make_learner(normed, optimizer=OPTIMIZERS[optimizer][0])

    undisturbed, first, second = make(), make(), make()
    train(undisturbed, 6)
    train(first, 3)
    train(second, 1, first=40)  # a replica that is elsewhere
    second.load(TrainState.from_bytes(first.state().to_bytes()))
    train(second, 3, first=3)
    expected, found = undisturbed.state(), second.state()
    for group in ("weights", "buffers", "optimizer"):
        arrays = getattr(expected, group)
        assert getattr(found, group).keys() == arrays.keys()
        for name, array in arrays.items():
            assert np.array_equal(getattr(found, group)[name], array), name
    assert np.array_equal(second.evaluate(*rows(5)).numpy(), undisturbed.evaluate(*rows(5)).numpy())


def test_a_state_before_the_first_step_resets_the_optimizer() -> None:
    fresh, used = make_learner(), make_learner()
    start = fresh.state()
    train(used, 2)
    used.load(start)
    train(used, 2)
    train(fresh, 2)
    for name, weights in fresh.weights().items():
        assert np.array_equal(used.weights()[name], weights)


def test_weights_carry_the_models_own_names_and_frozen_ones_too() -> None:
    def make() -> nn.Module:
        model = dense()
        model[0].requires_grad_(False)
        return model

    learner = make_learner(make)
    before = learner.weights()
    assert list(before) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    train(learner, 3)
    after = learner.weights()
    assert [name for name in before if not np.array_equal(before[name], after[name])] == ["2.weight", "2.bias"]
    other = make_learner(make, train={"seed": 1})
    other.load(learner.state())
    assert all(np.array_equal(other.weights()[name], after[name]) for name in after)


def test_states_of_another_model_or_optimizer_are_refused() -> None:
    learner, wide = make_learner(), make_learner(lambda: nn.Linear(FEATURES, CLASSES))
    train(learner, 1)
    with pytest.raises(StorageError, match=r"saved weights do not fit the model: 0\.bias"):
        wide.load(learner.state())
    with pytest.raises(StorageError, match="buffers do not fit"):
        learner.load(TrainState(learner.weights(), {"running_mean": np.zeros(2, np.float32)}))
    momentum = make_learner(optimizer={"name": "sgd", "momentum": 0.9})
    with pytest.raises(StorageError, match="of another optimizer"):
        momentum.load(learner.state())
    state = learner.state()
    state.optimizer.pop("exp_avg.0.bias")
    with pytest.raises(StorageError, match=r"optimizer state do not fit the model: 0\.bias"):
        learner.load(state)


class Masked(nn.Module):
    """Buffers as transformers have them: a mask of minus infinities, positions, a flag; and a parameter that nobody uses."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("positions", torch.arange(4, dtype=torch.int32), persistent=False)
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y


def test_constant_buffers_stay_and_an_unused_parameter_is_no_trouble() -> None:
    learner = make_learner(Masked)
    before = learner.state()
    train(learner, 2)
    after = learner.state()
    for name in ("mask", "positions"):
        assert np.array_equal(before.buffers[name], after.buffers[name])
    assert np.array_equal(after.weights["unused"], np.ones(3))
    assert not np.array_equal(before.weights["inner.0.weight"], after.weights["inner.0.weight"])
    assert learner._has_unused()
    assert not make_learner()._has_unused()


def test_looking_for_unused_parameters_leaves_no_trace() -> None:
    learner, other = make_learner(normed), make_learner(normed)
    train(learner, 1)
    train(other, 1)
    learner._has_unused()
    train(learner, 2, first=1)
    train(other, 2, first=1)
    for name, weights in other.weights().items():
        assert np.array_equal(learner.weights()[name], weights)


def test_shared_weights_are_one_parameter() -> None:
    def make() -> nn.Module:
        first, last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        last.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), last, nn.Linear(FEATURES, CLASSES))

    learner = make_learner(make)
    train(learner, 2)
    assert "2.weight" not in learner.weights()
    first, _, last, _ = learner.model.children()
    assert torch.equal(cast(torch.Tensor, first.weight), cast(torch.Tensor, last.weight))


def test_bfloat16_computes_in_half_and_keeps_weights_in_float32() -> None:
    half, full = make_learner(train={"precision": "bf16"}), make_learner()
    x, y = rows(8)
    low, high = half.shard(x, y, 0).vector.clone(), full.shard(x, y, 0).vector.clone()
    assert half.layout.dtype == torch.float32
    assert not torch.equal(low, high)
    torch.testing.assert_close(low, high, rtol=0.1, atol=0.1)
    assert all(weights.dtype == np.float32 for weights in half.weights().values())


def test_models_in_half_precision_or_without_parameters_are_refused() -> None:
    with pytest.raises(JobError, match=r"torch\.bfloat16; expected float32 or float64 .* train\.precision: bf16"):
        make_learner(lambda: dense().to(torch.bfloat16))
    with pytest.raises(JobError, match="nothing to train"):
        make_learner(nn.Flatten)

    def mixed() -> nn.Module:
        model = normed()
        model[1].running_var = torch.ones(6, dtype=torch.float64)
        return model

    with pytest.raises(JobError, match=r"buffer has dtype torch\.float64; expected torch\.float32"):
        make_learner(mixed)


def test_double_precision_stays_double() -> None:
    class Double(Given):
        def torch_inputs(self, x: torch.Tensor) -> torch.Tensor:
            return x.double()

    learner = make_learner(lambda: dense().double(), Double)
    train(learner, 2)
    assert learner.layout.dtype == torch.float64
    assert all(weights.dtype == np.float64 for weights in learner.weights().values())


def test_replicas_start_equal_by_the_seed_alone() -> None:
    first, second, other = make_learner(), make_learner(), make_learner(train={"seed": 1})
    assert all(np.array_equal(second.weights()[name], weights) for name, weights in first.weights().items())
    assert not np.array_equal(first.weights()["0.weight"], other.weights()["0.weight"])


def test_fast_step_on_one_worker_is_the_exact_one_to_rounding() -> None:
    exact, fast = make_learner(optimizer={"name": "sgd"}), make_learner(optimizer={"name": "sgd"})
    fast.connect(1, 2)
    for step in range(3):
        x, y = rows(10, seed=step)
        total = reduce(exact, x, y)
        exact.apply(total.mean, total.counters, 0.1)
        sums = fast.fast_shard(x, y, step, len(y), [1, 0])
        fast.fast_apply(0.1)
        assert sums == pytest.approx([total.loss, total.correct, 1, 0])
    for name, weights in exact.weights().items():
        np.testing.assert_allclose(fast.weights()[name], weights, rtol=1e-4, atol=1e-6)


def test_an_error_in_the_tasks_code_is_not_taken_for_a_lost_peer() -> None:
    class Failing(Given):
        def torch_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("shapes do not match")

    learner = make_learner(dense, Failing)
    learner.connect(1, 0)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        learner.fast_shard(*rows(4), 0, 4, [])


def test_a_step_that_comes_to_nothing_leaves_no_trace() -> None:
    """Its peers died: what a newcomer then gets is the state before it."""
    learner = make_learner(normed)
    train(learner, 2)
    before = learner.state().to_bytes()
    learner.shard(*rows(6), seed=1)
    assert learner.state().to_bytes() == before
