"""When a generation forms, with whom, and who leads it: rules over plain data."""

from __future__ import annotations

from raytrain_app.elastic.roster import Generation, Roster, Standing, WorkerInfo


def info(name: str) -> WorkerInfo:
    return WorkerInfo(name, 0, "node", 1, f"host-{name}", 1000, handle=None)


def waiting(initial: int, **clocks: int) -> Roster:
    roster = Roster(initial)
    for name, clock in clocks.items():
        roster.wait(info(name), clock, 0.0)
    return roster


def formed(initial: int = 2, **clocks: int) -> tuple[Roster, dict[str, Generation]]:
    roster = waiting(initial, **clocks)
    return roster, roster.form(recorded=-1)


def test_first_generation_waits_for_all_expected_workers() -> None:
    roster = waiting(3, a=-1, b=-1)
    assert not roster.can_form()
    roster.wait(info("c"), -1, 0.0)
    assert roster.can_form()


def test_fresh_workers_take_their_state_from_the_first() -> None:
    _, places = formed(a=-1, b=-1)
    assert [places[name].rank for name in "ab"] == [0, 1]
    assert places["b"].leader_clock == -1
    assert places["b"].behind == (1,)
    assert places["b"].host == "host-a"


def test_the_furthest_leads_and_the_others_are_behind() -> None:
    _, places = formed(a=4, b=5, c=-1)
    assert places["a"].members == ("b", "a", "c")
    assert places["a"].leader_clock == 5
    assert places["a"].behind == (1, 2)


def test_equal_replicas_take_nothing_over() -> None:
    _, places = formed(a=5, b=5)
    assert places["a"].behind == ()


def test_no_generation_while_a_member_is_missing() -> None:
    roster, _ = formed(a=-1, b=-1)
    roster.wait(info("a"), 3, 0.0)
    assert not roster.can_form()
    assert [worker.info.worker_id for worker in roster.missing()] == ["b"]
    roster.remove("b")
    assert roster.can_form()
    assert roster.form(-1)["a"].members == ("a",)


def test_a_newcomer_is_noticed_and_taken_in_with_the_members() -> None:
    roster, _ = formed(a=-1, b=-1)
    assert not roster.newcomers()
    roster.wait(info("c"), -1, 0.0)
    assert roster.newcomers()
    assert not roster.can_form()
    roster.wait(info("a"), 7, 0.0)
    assert roster.newcomers()
    roster.wait(info("b"), 7, 0.0)
    places = roster.form(-1)
    assert places["c"].rank == 2
    assert places["c"].behind == (2,)
    assert places["c"].number == 2


def test_a_lone_survivor_of_everything_forms_the_next_generation() -> None:
    roster, _ = formed(initial=3, a=-1, b=-1, c=-1)
    for name in "abc":
        roster.remove(name)
    roster.wait(info("d"), -1, 0.0)
    assert roster.can_form()
    assert roster.form(-1)["d"].leader_clock == -1


def test_a_new_roster_adopts_a_running_generation() -> None:
    roster = Roster(3)
    roster.adopt(info("a"), generation=4, clock=10, now_s=0.0)
    roster.adopt(info("b"), generation=4, clock=10, now_s=0.0)
    roster.adopt(info("old"), generation=3, clock=9, now_s=0.0)
    assert roster.generation == 4
    assert roster.members == ("a", "b")
    assert [w.info.worker_id for w in roster.standing(Standing.ACTIVE)] == ["a", "b"]
    roster.wait(info("a"), 11, 0.0)
    assert not roster.can_form()
    roster.wait(info("b"), 11, 0.0)
    assert roster.form(-1)["a"].number == 5


def part(name: str, pool: int, place: int) -> WorkerInfo:
    return WorkerInfo(name, pool, "node", 1, f"host-{name}", 1000, handle=None, peers=2, place=place)


def test_replicas_in_parts_are_in_a_generation_as_a_whole_or_not_at_all() -> None:
    roster = Roster(2)
    for name, pool, place, clock in [("b0", 1, 0, 3), ("a1", 0, 1, 7), ("b1", 1, 1, -1), ("a0", 0, 0, 7), ("c1", 2, 1, 9)]:
        roster.wait(part(name, pool, place), clock, 0.0)
    places = roster.form(recorded=-1)
    assert roster.members == ("a0", "a1", "b0", "b1"), "by place, those furthest first, and none whose replica is not whole"
    assert [places[name].rank for name in ("a0", "a1", "b0", "b1")] == [0, 1, 2, 3]
    assert not roster.newcomers(), "one without its mate cannot join"
    roster.wait(part("c0", 2, 0), -1, 0.0)
    assert roster.newcomers()


def test_a_replica_that_lost_a_worker_waits_for_the_next_one_while_others_go_on() -> None:
    roster = Roster(4)
    for name, pool, place in [("a0", 0, 0), ("a1", 0, 1), ("b0", 1, 0), ("b1", 1, 1)]:
        roster.wait(part(name, pool, place), -1, 0.0)
    roster.form(recorded=-1)
    roster.remove("b1")
    for name, pool, place in [("a0", 0, 0), ("a1", 0, 1), ("b0", 1, 0)]:
        roster.wait(part(name, pool, place), 5, 0.0)
    assert roster.can_form()
    assert roster.waits_for_members()
    roster.form(recorded=-1)
    assert roster.members == ("a0", "a1")
    assert not roster.waits_for_members(), "nobody is late for the one that is left over"
    roster.wait(part("b1-new", 1, 1), -1, 0.0)
    assert roster.newcomers()


def test_nothing_forms_of_halves_alone() -> None:
    roster = Roster(2)
    roster.wait(part("a0", 0, 0), -1, 0.0)
    roster.wait(part("b1", 1, 1), -1, 0.0)
    assert not roster.can_form()


def test_a_heartbeat_that_comes_after_the_farewell_takes_no_seconds_back() -> None:
    worker = waiting(1, a=0).workers["a"]
    worker.spend({"useful": 2.0, "idle": 1.0, "undecided": 0.0})
    worker.spend({"useful": 1.5, "idle": 1.0, "undecided": 0.4})
    assert worker.seconds == {"useful": 2.0, "idle": 1.0, "undecided": 0.0}
    worker.spend({"useful": 2.0, "idle": 1.5, "undecided": 0.1})
    assert worker.seconds == {"useful": 2.0, "idle": 1.5, "undecided": 0.1}
