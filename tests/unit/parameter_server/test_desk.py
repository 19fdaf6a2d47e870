"""What a server keeps of its versions in bulk mode."""

from __future__ import annotations

import dataclasses

from raytrain_app.strategies.parameter_server.desk import Desk
from raytrain_app.strategies.parameter_server.lead import Scored
from raytrain_app.strategies.parameter_server.ledger import WAIT, Plan
from raytrain_app.strategies.parameter_server.snapshot import cut_anew
from tests.unit.parameter_server.making import ONES, Farm, farm, ones

BULK = dataclasses.replace(ONES, bulk=True, parts=2)
PLAN = Plan(steps_per_epoch=10, epochs=3, parts=2, sync="bulk")


def steps(made: Farm, count: int) -> list[list[int]]:
    """Does so many steps, and returns the versions of the snapshots that each server took."""
    client = made.client()
    taken: list[list[int]] = [[] for _ in made.desks]
    lease = client.take()
    for _ in range(count * made.policy.parts):
        lease = client.push(ones(client, lease)).lease
        lease = client.take() if lease < 0 else lease
        for versions, desk in zip(taken, made.desks, strict=True):
            snapshot = take(desk)
            versions += [] if snapshot is None else [snapshot]
    client.close()
    return taken


def take(desk: Desk) -> int | None:
    with desk.lock:
        snapshot = desk.take_snapshot()
    if snapshot is None:
        return None
    assert snapshot.vector.tolist() == [float(snapshot.version)] * len(snapshot.vector)
    assert not snapshot.ledger or snapshot.ledger["ledger"]["done"]["low"] == 2 * snapshot.version
    return snapshot.version


def test_all_servers_keep_the_same_versions() -> None:
    with farm(PLAN, BULK, servers=3) as made:
        for desk, every in zip(made.desks, (4, 4, 2), strict=True):
            desk.snapshot_every = every
        # 18 of them are done for sure, as the last one was not confirmed by everybody yet.
        assert steps(made, 9) == [[4, 8], [4, 8], [2, 4, 6, 8]]


def test_an_epochs_end_is_kept_with_what_comes_after_it_until_it_is_scored() -> None:
    with farm(PLAN, BULK, servers=2) as made:
        for desk in made.desks:
            desk.snapshot_every = 4
        assert steps(made, 15) == [[4, 8, 10, 12], [4, 8, 10, 12]]
        states = [desk.state() for desk in made.desks]
        assert [state.ends[1].version for state in states] == [10, 10]
        assert states[0].ends[1].ledger["ledger"]["done"]["low"] == 20
        ends = [state.ends[1] for state in cut_anew(states, 3)]
        assert [len(end.vector) for end in ends] == [len(state.vector) for state in cut_anew(states, 3)]
        for number, state in enumerate(states):
            made.restart(number, state)
            assert made.desks[number].captured[1].version == 10
        lead = made.desks[0].lead
        assert lead is not None
        lead.scored(Scored({}), 0.1)
        made.desks[1].scored = 1
        assert [desk.state().ends for desk in made.desks] == [{}, {}]


def test_a_part_that_waited_for_its_step_is_not_taken_for_done_by_a_restored_lead() -> None:
    with farm(PLAN, BULK, servers=2) as made:
        dies, lives = made.client("dies"), made.client("lives")
        assert [dies.take(), lives.take()] == [0, 1]
        dies.push(ones(dies, 0), wants=False)
        assert dies.take() == WAIT
        with made.desks[0].lock:
            state = made.desks[0].snapshot_now()  # the step is a slow one
        assert state is not None
        lives.push(ones(lives, 1), wants=False)
        assert lives.take() == 2
        dies.close()
        made.restart(0, state)
        assert lives.take() == WAIT
        assert lives.take() == WAIT
        assert made.desks[0].lead is not None
        assert made.desks[0].lead.beyond == 1, "nobody has the first part, and the other server is beyond its step"


def test_a_server_that_begins_with_an_epochs_end_has_it_for_the_validation() -> None:
    with farm(PLAN, BULK, servers=2) as made:
        steps(made, 10)
        states = [made.desks[number].captured[1] for number in range(2)]
        steps(made, 4)
        for number, state in enumerate(states):
            made.restart(number, state)
        assert [desk.captured[1].version for desk in made.desks] == [10, 10]


def test_an_epochs_end_is_captured_though_several_steps_come_to_their_end_at_once() -> None:
    with farm(PLAN, BULK, servers=2) as made:
        early, late = made.client("early"), made.client("late")
        state = made.desks[1].state()
        for step in range(12):
            assert [early.take(), late.take()] == [2 * step, 2 * step + 1]
            early.push(ones(early, 2 * step), wants=False)
            late.push(ones(late, 2 * step + 1), wants=False)
            early.take(), late.take()  # confirms it, and gives the next lease back
            made.desks[0].lead.ledger.forget("early")  # type: ignore[union-attr]
            made.desks[0].lead.ledger.forget("late")  # type: ignore[union-attr]
        made.restart(1, state)
        early.pull()
        late.pull()
        captured = made.desks[1].captured[1]
        assert captured.version == 10
        assert captured.vector.tolist() == [10.0] * len(captured.vector)
