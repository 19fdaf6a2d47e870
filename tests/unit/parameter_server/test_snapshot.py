"""States cut anew, put together, and through checkpoints: nothing changes but where it lies."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from raytrain_app.job import job_from_dict
from raytrain_app.learners.torch import TorchLearner
from raytrain_app.strategies.parameter_server.journal import Journal
from raytrain_app.strategies.parameter_server.policy import policy_of
from raytrain_app.strategies.parameter_server.shard import Push, Shard, ShardState
from raytrain_app.strategies.parameter_server.snapshot import cut_anew, first_states, from_checkpoint, load_into, to_checkpoint
from raytrain_app.task import load_task

JOB = job_from_dict(
    {
        "name": "s",
        "task": "mnist",
        "model": {"name": "cnn", "channels": 2, "hidden": 8, "batch_norm": True},
        "strategy": {"name": "parameter_server", "correction": "gap"},
    }
)


def learner() -> TorchLearner:
    return TorchLearner(JOB, load_task("mnist"), torch.device("cpu"))


def trained(servers: int) -> list[ShardState]:
    """States after some updates."""
    made = learner()
    states = first_states(made, policy_of(JOB, 1000, made.layout.num_parameters), servers)
    states[0].ledger = {"journal": Journal(JOB).to_json(), "ledger": {}}
    rng = np.random.default_rng(0)
    pushes = []
    for seed in range(3):
        x, y = rng.integers(0, 256, (8, 28, 28)).astype(np.uint8), rng.integers(0, 10, 8)
        pushes.append(made.shard(x, y, seed).vector.clone())
    found = []
    for state in states:
        shard = Shard(policy_of(JOB, 1000, state.num_parameters), state)
        for lease, vector in enumerate(pushes):
            grown = torch.ones(len(state.counters), dtype=torch.int64)
            base = shard.versions.current + 0.1
            shard.apply(Push(lease, vector[state.start : state.stop], grown, max(0, lease - 1), 0.1, 1), base)
        found.append(dataclasses.replace(shard.state(), ledger=state.ledger))
    return found


def content(states: list[ShardState]) -> list[np.ndarray]:
    whole = cut_anew(states, 1)[0]
    return [whole.vector, whole.counters, *(whole.slots[name] for name in sorted(whole.slots) if name != "update_size")]


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_cutting_anew_changes_nothing(servers: int) -> None:
    states = trained(1)
    again = cut_anew(cut_anew(states, servers), 2)
    for expected, found in zip(content(states), content(again), strict=True):
        assert np.array_equal(expected, found)
    assert [state.version for state in again] == [3, 3]
    assert [len(state.counters) for state in again] == [len(states[0].counters), 0]
    assert [bool(state.ledger) for state in again] == [True, False]


def test_ranges_that_differ_in_what_they_applied_are_not_joined() -> None:
    states = trained(2)
    states[1].applied = {"low": 2, "above": []}
    with pytest.raises(AssertionError):
        cut_anew(states, 1)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_checkpoint_holds_everything(servers: int) -> None:
    states = trained(servers)
    states[-1].applied = {"low": 1, "above": [2]}
    one = learner()
    saved = to_checkpoint(one, states)
    saved.progress = json.loads(json.dumps(saved.progress))
    assert set(saved.weights) == set(one.weights())
    again = from_checkpoint(learner(), saved)
    for expected, found in zip(states, again, strict=True):
        assert (expected.start, expected.stop, expected.version, expected.updates) == (
            found.start,
            found.stop,
            found.version,
            found.updates,
        )
        assert expected.applied == found.applied
        assert expected.ledger == found.ledger
        assert np.array_equal(expected.vector, found.vector)
        assert np.array_equal(expected.counters, found.counters)
        assert set(expected.slots) == set(found.slots)
        assert all(np.array_equal(expected.slots[name], found.slots[name]) for name in expected.slots)


def test_the_learner_gets_the_servers_parameters() -> None:
    states = trained(2)
    one = learner()
    load_into(one, states)
    vector, counters = one.flat()
    assert np.array_equal(vector.numpy(), np.concatenate([state.vector for state in states]))
    assert np.array_equal(counters.numpy(), states[0].counters)
