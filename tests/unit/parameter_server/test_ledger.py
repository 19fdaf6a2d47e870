"""Leases: in order, back from the dead, each done once, and never more at work than the mode allows."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field

import pytest

from raytrain_app.strategies.parameter_server.ledger import END, WAIT, Ledger, Outcome, Plan


def outcome(worker: str, lease: int = 0) -> Outcome:
    return Outcome(worker, 1.0, 1, 1, [], 0.1, 0, [lease], 0.0)


def finish(ledger: Ledger, worker: str, lease: int) -> list[Outcome]:
    ledger.applied(lease, outcome(worker, lease))
    return confirm(ledger, lease)


def confirm(ledger: Ledger, lease: int) -> list[Outcome]:
    return [outcome for _, outcomes in ledger.confirm(lease) for outcome in outcomes]


def test_leases_come_in_order_and_returned_ones_first() -> None:
    ledger = Ledger(Plan(10, 1))
    assert [ledger.take(worker, 0) for worker in "abc"] == [0, 1, 2]
    ledger.release("b")
    assert ledger.counts.returned == 1
    assert finish(ledger, "a", 0)
    assert ledger.take("a", 1) == 1
    assert ledger.take("d", 1) == 3


def test_asking_again_gives_back_what_was_forgotten() -> None:
    ledger = Ledger(Plan(10, 1))
    assert ledger.take("a", 0) == 0
    assert ledger.take("a", 0) == 0
    assert ledger.next == 1


def test_what_is_pushed_but_not_confirmed_yet_is_not_given_out_again() -> None:
    ledger = Ledger(Plan(10, 1))
    assert ledger.take("a", 0) == 0
    ledger.applied(0, outcome("a"))
    assert ledger.take("a", 1) == 1
    assert ledger.take("b", 1) == 2
    assert ledger.confirm(0)
    assert ledger.counts.returned == 0


def test_a_confirmation_that_comes_after_the_lease_was_taken_back_counts() -> None:
    ledger = Ledger(Plan(10, 1))
    ledger.take("a", 0)
    ledger.applied(0, outcome("a"))
    ledger.release("a")  # its connection broke, but it lives
    assert ledger.confirm(0)
    assert ledger.take("b", 0) == 1


def test_the_end_comes_only_when_it_is_said() -> None:
    ledger = Ledger(Plan(2, 1))
    assert [ledger.take(worker, 0) for worker in "abc"] == [0, 1, WAIT]
    finish(ledger, "a", 0)
    finish(ledger, "b", 1)
    assert ledger.finished
    assert ledger.quiet
    assert ledger.take("a", 0) == WAIT
    ledger.ended = True
    assert ledger.take("a", 0) == END


def test_nobody_is_more_than_an_epoch_ahead_of_the_validation() -> None:
    ledger = Ledger(Plan(2, 5))
    taken = [ledger.take(f"w{n}", 0) for n in range(6)]
    assert taken == [0, 1, 2, 3, WAIT, WAIT]
    ledger.scored = 1
    assert ledger.take("w4", 0) == 4


def test_a_dead_workers_unconfirmed_push_is_done_again_and_counts_once() -> None:
    ledger = Ledger(Plan(3, 1))
    assert ledger.take("a", 0) == 0
    ledger.applied(0, outcome("a"))  # the first server has it, another perhaps not
    ledger.release("a")
    assert not ledger.quiet
    assert ledger.take("b", 1) == 0
    ledger.applied(0, outcome("b"))  # a duplicate for the first server
    ledger.release("b")  # this one dies too before it confirms
    assert ledger.take("c", 1) == 0
    ledger.applied(0, outcome("c"))
    assert [o.worker for o in confirm(ledger, 0)] == ["a"]
    assert ledger.confirm(0) == []
    assert 0 in ledger.done


def test_what_was_lost_is_done_again_but_told_once() -> None:
    ledger = Ledger(Plan(3, 1))
    for lease in range(3):
        ledger.take("a", lease)
        assert len(finish(ledger, "a", lease)) == 1
    ledger.undo([1])
    assert not ledger.finished
    assert ledger.counts.lost == 1
    ledger = Ledger.from_json(ledger.plan, json.loads(json.dumps(ledger.to_json())))
    assert ledger.take("b", 3) == 1
    assert finish(ledger, "b", 1) == []
    assert ledger.finished


def test_refused_gradients_are_given_to_the_next() -> None:
    ledger = Ledger(Plan(3, 1))
    ledger.take("a", 0)
    ledger.put_back(0)
    assert ledger.counts.refused == 1
    assert ledger.take("b", 4) == 0


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_bounded_never_lets_a_gradient_miss_more(staleness: int) -> None:
    plan, rng = Plan(60, 1, 1, "bounded", staleness), random.Random(staleness)
    ledger, version, most = Ledger(plan), 0, 0
    begun: dict[str, tuple[int, int]] = {}
    while not ledger.finished:
        worker = f"w{rng.randrange(6)}"
        if worker in begun:
            lease, base = begun.pop(worker)
            assert version - base <= staleness
            most = max(most, version - base)
            version += 1
            finish(ledger, worker, lease)
        elif (lease := ledger.take(worker, version)) >= 0:
            begun[worker] = lease, version
    assert most == min(staleness, 5), "the bound is used, not merely kept"


def test_bulk_waits_for_the_whole_step() -> None:
    ledger = Ledger(Plan(2, 1, 3, "bulk"))
    assert [ledger.take(worker, 0) for worker in "abcd"] == [0, 1, 2, WAIT]
    assert finish(ledger, "c", 2) == []
    assert finish(ledger, "a", 0) == []
    assert ledger.take("a", 0) == WAIT
    assert sorted(o.ids[0] for o in finish(ledger, "b", 1)) == [0, 1, 2]
    assert ledger.take("a", 1) == 3


def test_bulk_steps_are_done_in_order_however_late_their_parts_are_told_of() -> None:
    """Workers of a lost lead send their parts again one after the other, and a step may have none of the slowest one's."""
    ledger = Ledger.from_json(Plan(4, 1, 2, "bulk"), Ledger(Plan(4, 1, 2, "bulk")).to_json())
    assert finish(ledger, "a", 0) == []
    assert [finish(ledger, "b", lease) for lease in (2, 3, 4, 5)] == [[], [], [], []], "the first step is not done"
    assert [outcome.ids[0] for outcome in finish(ledger, "c", 1)] == [0, 1, 2, 3, 4, 5]
    assert ledger.done.low == 6


def test_who_is_at_one_lease_for_long_is_known() -> None:
    ledger = Ledger(Plan(10, 1))
    before_s = time.monotonic()
    assert ledger.take("slow", 0) == 0
    assert ledger.take("fast", 0) == 1
    between_s = time.monotonic()
    assert ledger.take("fast", 1) == 1, "asking again begins anew"
    assert ledger.holders(before_s) == set()
    assert ledger.holders(between_s) == {"slow"}
    ledger.forget("slow")
    assert ledger.holders(time.monotonic()) == {"fast"}


def test_draining_gives_out_only_what_was_taken_back() -> None:
    ledger = Ledger(Plan(9, 1))
    assert [ledger.take(worker, 0) for worker in "ab"] == [0, 1]
    ledger.draining = True
    ledger.release("b")
    finish(ledger, "a", 0)
    assert ledger.take("a", 1) == 1
    assert ledger.take("c", 1) == WAIT
    assert not ledger.quiet
    finish(ledger, "a", 1)
    assert ledger.quiet


def test_draining_lets_a_step_that_has_begun_come_to_its_end() -> None:
    """A part of it waits for the others, so it would be at work for ever without them."""
    ledger = Ledger(Plan(9, 1, parts=4, sync="bulk"))
    assert [ledger.take(worker, 0) for worker in "ab"] == [0, 1]
    ledger.draining = True
    for lease in (0, 1):
        finish(ledger, "a", lease)
    assert not ledger.quiet
    assert [ledger.take(worker, 0) for worker in "abc"] == [2, 3, WAIT]
    for lease in (2, 3):
        finish(ledger, "a", lease)
    assert ledger.quiet
    assert ledger.take("a", 1) == WAIT


@pytest.mark.parametrize("plan", [Plan(9, 1), Plan(9, 1, parts=4, sync="bulk")], ids=["async", "bulk"])
def test_a_restored_ledger_learns_of_leases_that_only_another_server_knows(plan: Plan) -> None:
    """They were handed out after it was kept, and their worker died with the lead: nobody else would do them while it drains."""
    ledger = Ledger.from_json(plan, Ledger(plan).to_json())
    ledger.draining = True
    assert ledger.quiet
    ledger.admit(3)
    assert not ledger.quiet
    leases = [ledger.take(worker, 0) for worker in "abcde"]
    assert leases == ([0, 1, 2, 3, WAIT] if plan.parts > 1 else [0, 1, 2, WAIT, WAIT])
    for lease in leases:
        if lease != WAIT:
            finish(ledger, "a", lease)
    assert ledger.quiet


@dataclass
class World:
    """Workers, servers and a ledger, with everything that may go wrong between them."""

    rng: random.Random
    plan: Plan
    servers: int
    ledger: Ledger = field(init=False)
    held: dict[str, int] = field(default_factory=dict)
    pushed: list[list[int]] = field(init=False)
    told: list[int] = field(default_factory=list)
    saved: str = ""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.plan)
        self.pushed = [[] for _ in range(self.servers)]
        self.save()

    def save(self) -> None:
        self.saved = json.dumps({"ledger": self.ledger.to_json(), "lead": self.pushed[0]})

    def step(self) -> None:
        worker = f"w{self.rng.randrange(4)}"
        choice = self.rng.random()
        if choice < 0.03:  # the lead dies; every push after its snapshot is lost there
            saved = json.loads(self.saved)
            self.ledger, self.pushed[0] = Ledger.from_json(self.plan, saved["ledger"]), saved["lead"]
            for name, lease in self.held.items():
                self.ledger.hold(name, lease, 0)
        elif choice < 0.06:  # another server dies and loses what came last
            pushed = self.pushed[self.rng.randrange(1, self.servers)]
            del pushed[max(0, len(pushed) - self.rng.randrange(6)) :]
        elif choice < 0.12:
            self.held.pop(worker, None)
            self.ledger.release(worker)
        elif choice < 0.2:
            self.save()
        elif choice < 0.3:
            done = {lease for lease in range(self.plan.total) if lease in self.ledger.done}
            self.ledger.undo(lease for lease in done if any(lease not in pushed for pushed in self.pushed))
        elif worker in self.held:
            self.push(worker, self.held.pop(worker))
        elif (lease := self.ledger.take(worker, 0)) >= 0:
            self.held[worker] = lease

    def push(self, worker: str, lease: int) -> None:
        """Pushes to all servers, or dies on the way; then the ledger hears of it."""
        for server in range(self.servers):
            if self.rng.random() < 0.05:
                self.ledger.release(worker)
                return
            if lease not in self.pushed[server]:
                self.pushed[server].append(lease)
            if server == 0:
                self.ledger.applied(lease, outcome(worker, lease))
        self.told += [o.ids[0] for o in confirm(self.ledger, lease)]


@pytest.mark.parametrize("sync", ["async", "bulk"])
@pytest.mark.parametrize("seed", range(20))
def test_everything_is_done_whatever_dies(seed: int, sync: str) -> None:
    world = World(random.Random(seed), Plan(12, 2, 3 if sync == "bulk" else 1, sync, None), 3)  # type: ignore[arg-type]
    for _ in range(100_000):
        world.step()
        world.ledger.scored = max(world.ledger.scored, world.ledger.epochs_done)
        everything = set(range(world.plan.total))
        if world.ledger.finished and all(everything == set(pushed) for pushed in world.pushed):
            break
    else:
        pytest.fail("the work does not end")
    assert set(world.told) == set(range(world.plan.total))
