"""One range: every lease counts once, old gradients are refused, and whole steps have the bits of the synchronous sum."""

from __future__ import annotations

import dataclasses
import functools
import random

import numpy as np
import pytest
import torch

from raytrain_app.elastic.reduce import Layout, Ready, Reducer
from raytrain_app.elastic.reduce import Shard as Part
from raytrain_app.strategies.parameter_server.correction import Correction
from raytrain_app.strategies.parameter_server.shard import Policy, Push, Shard, ShardState, Status
from raytrain_app.strategies.parameter_server.update import Update

NOTHING = torch.zeros(0, dtype=torch.int64)


def make_shard(policy: Policy, size: int = 4, counters: int = 0) -> Shard:
    slots = Shard.new_slots(policy, min(size, policy.num_parameters), torch.float32)
    return Shard(policy, ShardState(0, size, np.zeros(size, np.float32), slots, np.zeros(counters, np.int64)))


def ones(lease: int, base: int, size: int = 4, value: float = 1.0) -> Push:
    return Push(lease, torch.full((size,), value), NOTHING, base, -1.0, 1)


def the_one_of(made: list[Part], number: int, ready: Ready | None) -> Part:
    return made[number]


def test_a_lease_counts_once_in_whatever_order() -> None:
    shard = make_shard(Policy(num_parameters=4))
    calls = [lease for lease in range(20) for _ in range(3)]
    random.Random(0).shuffle(calls)
    found = [shard.apply(ones(lease, shard.version)) for lease in calls]
    assert found.count(Status.DONE) == 20
    assert found.count(Status.DUPLICATE) == 40
    assert shard.versions.current.tolist() == [20.0] * 4
    assert (shard.version, shard.updates, shard.applied.low) == (20, 20, 20)


def test_too_old_is_refused_and_changes_nothing() -> None:
    shard = make_shard(Policy(staleness=2, num_parameters=4))
    for lease in range(3):
        shard.apply(ones(lease, shard.version))
    assert shard.apply(ones(9, base=0)) is Status.REFUSED
    assert shard.apply(ones(9, base=-1)) is Status.REFUSED
    assert shard.versions.current.tolist() == [3.0] * 4
    assert shard.apply(dataclasses.replace(ones(9, base=0), missed=0)) is Status.DONE
    assert shard.apply(ones(10, base=2)) is Status.DONE


def test_staleness_divides_the_rate() -> None:
    shard = make_shard(Policy(correction=Correction("staleness"), num_parameters=4))
    for lease, base in enumerate((0, 1, 0, 0)):
        shard.apply(ones(lease, base))
    assert shard.versions.current.tolist() == pytest.approx([1 + 1 + 1 / 2 + 1 / 3] * 4)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_a_gap_shortens_the_step_of_each_parameter(rule: str) -> None:
    policy = Policy(Update(rule), Correction("gap"), num_parameters=4)  # type: ignore[arg-type]
    corrected, plain = make_shard(policy), make_shard(dataclasses.replace(policy, correction=Correction("none")))
    for shard in (corrected, plain):
        shard.apply(ones(0, 0))
        before = shard.versions.current.clone()
        base = before - torch.tensor([0.0, 1.0, 2.0, 3.0])
        shard.apply(ones(1, 0), base)
    steps = [shard.versions.current - before for shard in (corrected, plain)]
    assert (steps[1] / steps[0]).tolist() == pytest.approx([1.0, 2.0, 3.0, 4.0], rel=1e-4), "one update moved parameters by 1"


def test_float_buffers_move_towards_the_senders_and_counters_grow() -> None:
    shard = make_shard(Policy(num_parameters=2), size=3, counters=1)
    shard.apply(dataclasses.replace(ones(0, 0, 3, 8.0), counters=torch.tensor([2])))
    assert shard.versions.current.tolist() == [8.0, 8.0, 8.0]
    shard.apply(dataclasses.replace(ones(1, 0, 3, 0.0), counters=torch.tensor([3])))
    assert shard.versions.current.tolist() == [8.0, 8.0, 4.0], "it missed one update, so it counts half"
    assert shard.counters.tolist() == [5]


def test_a_version_that_is_read_stays_as_it_is() -> None:
    shard = make_shard(Policy(num_parameters=4))
    pinned = shard.versions.pin()
    for lease in range(5):
        shard.apply(ones(lease, shard.version))
    assert shard.versions.tensor(pinned).tolist() == [0.0] * 4
    assert len(shard.versions.segments) == 3, "one that is read, the current one and the next"
    shard.versions.unpin(pinned)


def test_a_restored_range_goes_on_as_if_nothing_had_happened() -> None:
    policy = Policy(Update("adam"), Correction("delay"), num_parameters=4)
    one, other = make_shard(policy), make_shard(policy)
    for lease in (0, 2, 1, 4):
        for shard in (one, other):
            shard.apply(ones(lease, max(0, shard.version - 1), value=lease - 1.0), shard.versions.current * 0.9)
    other = Shard(policy, other.state())
    for shard in (one, other):
        assert shard.apply(ones(4, 0)) is Status.DUPLICATE
        shard.apply(ones(3, 2), shard.versions.current * 0.5)
    assert torch.equal(one.versions.current, other.versions.current)
    assert one.state().applied == other.state().applied == {"low": 5, "above": []}


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_bulk_steps_have_the_bits_of_the_synchronous_reduction(parts: int) -> None:
    layout = Layout(64, 5, 2)
    policy = Policy(Update("sgd"), bulk=True, parts=parts, num_parameters=64)
    shard = make_shard(policy, layout.size, layout.num_counters)
    reducer = Reducer(0, 1, parts, layout, 0, torch.device("cpu"))
    expected = torch.zeros(layout.size)
    rng = np.random.default_rng(0)
    for step in range(3):
        rows = [0 if number == 2 and step == 1 else 5 + number for number in range(parts)]
        made = []
        for number in range(parts):
            vector = torch.from_numpy(
                (rng.normal(size=layout.size) * 10.0 ** rng.integers(-9, 9, layout.size)).astype(np.float32)
            )
            vector = vector if rows[number] else torch.zeros(layout.size)
            made.append(Part(vector, torch.tensor([step, number]), torch.zeros(2, dtype=torch.float64)))
        total = reducer.reduce(functools.partial(the_one_of, made), sum(rows), sum(map(bool, rows)), [])
        expected = torch.cat([torch.add(expected[:64], total.mean[:64], alpha=-0.1), total.mean[64:]])
        for number in np.random.default_rng(step).permutation(parts):
            part = made[number]
            before = shard.version
            push = Push(step * parts + int(number), part.vector.clone(), part.counters, -1, 0.1, rows[number])
            assert shard.apply(push) is Status.DONE
            assert shard.apply(push) is Status.DUPLICATE
            push.vector.zero_()  # the sender uses its memory again
        assert shard.version == before + 1 == step + 1
        assert torch.equal(shard.versions.current, expected)


def test_bulk_keeps_early_parts_until_their_step_comes() -> None:
    shard = make_shard(Policy(bulk=True, parts=2, num_parameters=4))
    for lease in (3, 2, 1):
        assert shard.apply(ones(lease, -1)) is Status.DONE
        assert shard.version == 0
        assert shard.holds(lease)
    shard.apply(ones(0, -1))
    assert shard.version == 2
    assert shard.epochs == 2
    assert shard.versions.current.tolist() == [2.0] * 4
