"""Backward that tells which gradients are complete: what it tells is true, and gradients that come in parts are not told."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raytrain_app.elastic.exchange import PeerLost
from raytrain_app.elastic.reduce import Shard
from raytrain_app.errors import TrainingError
from raytrain_app.learners.gradients import GradientWatch
from raytrain_app.learners.torch import TorchLearner
from raytrain_app.learners.torch_parts import places
from tests.unit.learners.test_fast import WithUnused
from tests.unit.learners.test_torch import dense, make_learner, normed, rows


class Shared(nn.Module):
    """Two layers share their weight; with `recomputes` its gradient comes from each in a backward of its own."""

    recomputes = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True) if self.recomputes else self.first(x)
        return self.last(x)  # type: ignore[no-any-return]


def watched(learner: TorchLearner, seed: int) -> tuple[list[int], Shard]:
    """Computes a shard; returns what was told, which it checks against the end."""
    told: list[tuple[int, torch.Tensor]] = []
    x, y = rows(8, seed)
    shard = learner.shard(x, y, seed, lambda vector, first: told.append((first, vector[first:].clone())))
    end = learner.layout.num_parameters
    for first, values in told:
        assert values[: end - first].equal(shard.vector[first:end])
    return [first for first, _ in told], shard


@pytest.mark.parametrize("model", [dense, normed])
def test_gradients_are_told_from_the_last_to_the_first_and_are_those_of_a_plain_backward(model: type[nn.Module]) -> None:
    learner, plain = make_learner(model), make_learner(model)
    for seed in range(3):
        told, shard = watched(learner, seed)
        assert shard.vector.equal(plain.shard(*rows(8, seed), seed).vector)
        if seed == 0:
            assert told == [], "the first time it only looks"
        else:
            assert told == sorted(told, reverse=True)
            assert len(told) >= len(list(plain.model.parameters())) / 2
            assert told[-1] == 0


def test_shards_that_nobody_waits_for_tell_nothing() -> None:
    learner = make_learner(dense)
    assert [watched(learner, seed)[0] != [] for seed in range(2)] == [False, True]
    learner.shard(*rows(8), 0)
    assert learner.shard(*rows(0), 0, lambda *_: pytest.fail("there is no gradient")).vector.count_nonzero() == 0
    assert watched(learner, 2)[0] != []


def test_a_gradient_that_does_not_come_holds_back_those_before_it() -> None:
    learner = make_learner(WithUnused)
    unused = places({name: p.shape for name, p in learner.model.named_parameters()})[0]["unused"].start
    for seed in range(2):
        told, _ = watched(learner, seed)
    assert all(first > unused for first in told)


def test_gradients_that_come_in_parts_are_not_told() -> None:
    learner = make_learner(Shared)
    assert [watched(learner, seed)[0] for seed in range(3)] == [[], [], []]


def test_a_gradient_that_comes_again_after_it_was_told_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner(Shared)
    monkeypatch.setattr(Shared, "recomputes", False)
    for seed in range(2):
        told, _ = watched(learner, seed)
    assert told[-1] == 0
    monkeypatch.setattr(Shared, "recomputes", True)
    with pytest.raises(TrainingError, match=r"the gradient of first\.(weight|bias) came in several parts"):
        watched(learner, 2)


class Rescaled(nn.Sequential):
    """A hook of the first layer changes the gradients of all of them, which have come before."""

    def __init__(self) -> None:
        super().__init__(*dense())
        first, *_, self._last = self.parameters()
        first.register_post_accumulate_grad_hook(self._rescale)

    def _rescale(self, _: torch.Tensor) -> None:
        assert self._last.grad is not None
        self._last.grad.mul_(0.5)


def test_gradients_that_are_changed_after_they_have_come_are_not_told() -> None:
    learner = make_learner(Rescaled)
    assert [watched(learner, seed)[0] for seed in range(3)] == [[], [], []]


def test_a_shard_that_is_given_up_leaves_no_trace() -> None:
    learner = make_learner(normed)
    watched(learner, 0)
    before = learner.state().to_bytes()
    expected = learner.shard(*rows(8, 1), 1).vector.clone()

    def lost(vector: torch.Tensor, first: int) -> None:
        raise PeerLost("gone")

    with pytest.raises(PeerLost):
        learner.shard(*rows(8, 2), 2, lost)
    assert learner.state().to_bytes() == before
    assert learner.shard(*rows(8, 1), 1).vector.equal(expected)


def test_an_error_of_the_listener_comes_out_as_it_is() -> None:
    model = dense()
    parameters = dict(model.named_parameters())
    watch = GradientWatch(parameters, places({name: p.shape for name, p in parameters.items()})[0])

    def fails(first: int) -> None:
        raise KeyError(first)

    watch.backward(model(torch.ones(2, 7)).sum(), fails)
    with pytest.raises(KeyError):
        watch.backward(model(torch.ones(2, 7)).sum(), fails)
