"""Decisions about pools: pure functions, checked for single cases and for what must hold for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from raytrain_app.scaling import HAND_OVER_S, Abort, Decision, Park, PoolView, Retire, Settling, Start, Unpark, decide

CALM: Mapping[str, float] = {}


def pool(number: int, node_id: str, size: int, present: int | None = None, parked: int = 0, retiring: bool = False) -> PoolView:
    """A pool whose workers all train if nothing else is said."""
    return PoolView(number, node_id, size, size - parked if present is None else present, parked, retiring)


def of(*nodes: str) -> frozenset[str]:
    return frozenset(nodes)


def test_the_first_pools_take_the_roomiest_nodes() -> None:
    assert decide(5, [], {"a": 1, "b": 4, "c": 2}, of("a", "b", "c"), CALM) == [Start("b", 4), Start("c", 1)]


def test_enough_is_enough() -> None:
    assert decide(3, [pool(0, "a", 3)], {"a": 1}, of("a"), CALM) == []


def test_a_pool_that_still_starts_is_counted_and_not_doubled() -> None:
    assert decide(3, [pool(0, "a", 3, present=0)], {"a": 1}, of("a"), CALM) == []


def test_growth_brings_parked_workers_back_first() -> None:
    decisions = decide(5, [pool(0, "a", 2, parked=1), pool(1, "b", 1)], {"c": 8}, of("a", "b", "c"), CALM)
    assert decisions == [Unpark(0, 1), Start("c", 2)]


def test_shrinking_ends_the_newest_pools_that_fit_and_parks_the_rest() -> None:
    assert decide(2, [pool(0, "a", 3), pool(1, "b", 2)], {}, of("a", "b"), CALM) == [Retire(1), Park(0, 1)]


def test_a_pool_on_a_dead_node_is_ended_and_replaced() -> None:
    assert decide(4, [pool(0, "a", 2), pool(1, "gone", 2)], {"a": 0, "b": 2}, of("a", "b"), CALM) == [Abort(1), Start("b", 2)]


def test_a_pool_whose_room_others_took_looks_elsewhere() -> None:
    """It has no place yet, and the node has less room than it needs; one that has its place is never the one to go."""
    waiting, running = PoolView(0, "a", 2, waiting=True), pool(1, "a", 1)
    assert decide(3, [waiting, running], {"a": -1, "b": 2}, of("a", "b"), CALM) == [Abort(0), Start("b", 2)]
    assert decide(3, [waiting, running], {"a": 0, "b": 2}, of("a", "b"), CALM) == [], "it is only just starting"
    assert decide(1, [running], {"a": -1}, of("a"), CALM) == []


def test_a_draining_node_hands_over_once_others_train() -> None:
    pools, alive = [pool(0, "a", 2), pool(1, "b", 2)], of("a", "b")
    assert decide(4, pools, {"a": 0}, alive, {"b": 60.0}) == [Retire(1, draining=True)]
    lonely = [pool(1, "b", 2)]
    assert decide(2, lonely, {"a": 2}, alive, {"b": 60.0}) == [Start("a", 2)]
    starting = [pool(2, "a", 2, present=0), *lonely]
    assert decide(2, starting, {"a": 0}, alive, {"b": 60.0}) == []
    assert decide(2, starting, {"a": 0}, alive, {"b": HAND_OVER_S / 2}) == [Retire(1, draining=True)]


def test_a_retiring_pool_is_asked_once_and_not_counted() -> None:
    assert decide(2, [pool(0, "a", 2, retiring=True)], {"b": 2}, of("a", "b"), {"a": 9.0}) == [Start("b", 2)]


nodes = st.sampled_from("abcd")


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, list[PoolView], dict[str, int], frozenset[str], dict[str, float]]:
    pools = []
    for number in range(draw(st.integers(0, 4))):
        size = draw(st.integers(1, 4))
        parked = draw(st.integers(0, size))
        pools.append(PoolView(number, draw(nodes), size, draw(st.integers(0, size - parked)), parked, draw(st.booleans())))
    alive = draw(st.frozensets(nodes))
    draining = draw(st.dictionaries(st.sampled_from(sorted(alive)), st.floats(0, 60))) if alive else {}
    usable = sorted(alive - set(draining))
    rooms = draw(st.dictionaries(st.sampled_from(usable), st.integers(-2, 4))) if usable else {}
    return draw(st.integers(1, 8)), pools, rooms, alive, draining


def applied(
    decisions: Sequence[Decision], pools: Sequence[PoolView], alive: frozenset[str], draining: Mapping[str, float]
) -> int:
    """Workers that will train once all decisions are carried out and all that starts has started."""
    staying = [p for p in pools if p.node_id in alive and p.node_id not in draining and not p.retiring]
    retired = {decision.pool for decision in decisions if isinstance(decision, Retire)}
    count = sum(p.size - p.parked for p in staying if p.number not in retired)
    for decision in decisions:
        if isinstance(decision, Start):
            count += decision.size
        elif isinstance(decision, Unpark):
            count += decision.count
        elif isinstance(decision, Park):
            count -= decision.count
    return count


@given(situations())
def test_decisions_are_possible_and_lead_to_what_is_wanted(
    situation: tuple[int, list[PoolView], dict[str, int], frozenset[str], dict[str, float]],
) -> None:
    wanted, pools, rooms, alive, draining = situation
    decisions = decide(wanted, pools, rooms, alive, draining)
    by_number = {p.number: p for p in pools}
    touched = [decision.pool for decision in decisions if not isinstance(decision, Start)]
    assert len(touched) == len(set(touched))
    for decision in decisions:
        if isinstance(decision, Start):
            assert 0 < decision.size <= rooms[decision.node_id]
        elif isinstance(decision, Unpark):
            assert 0 < decision.count <= by_number[decision.pool].parked
        elif isinstance(decision, Park):
            assert 0 < decision.count < by_number[decision.pool].present
        elif isinstance(decision, Retire):
            assert not by_number[decision.pool].retiring
        else:
            assert by_number[decision.pool].node_id not in alive
    before, after = applied([], pools, alive, draining), applied(decisions, pools, alive, draining)
    if before < wanted:
        staying = [p for p in pools if p.node_id in alive and p.node_id not in draining and not p.retiring]
        possible = before + sum(p.parked for p in staying) + sum(max(0, room) for room in rooms.values())
        assert after == min(wanted, possible)
    present = sum(p.present for p in pools if p.node_id in alive and p.node_id not in draining and not p.retiring)
    if present >= wanted:
        removed = sum(
            by_number[d.pool].present for d in decisions if isinstance(d, Retire) and by_number[d.pool].node_id not in draining
        )
        removed += sum(d.count for d in decisions if isinstance(d, Park))
        assert present - removed == wanted


def test_a_node_is_used_at_once_until_one_has_died_young() -> None:
    settling = Settling(base_s=1.0)
    assert settling.settled(of("a"), 100.0) == of("a")
    assert settling.settled(of("a", "b"), 101.0) == of("a", "b")
    assert settling.settled(of("a"), 102.0) == of("a")
    assert settling.settled(of("a", "b"), 103.0) == of("a")
    assert settling.settled(of("a", "b"), 103.9) == of("a")
    assert settling.settled(of("a", "b"), 104.0) == of("a", "b")


def test_a_flapping_node_is_waited_for_longer_and_longer() -> None:
    settling, now_s = Settling(base_s=1.0, limit_s=8.0), 0.0
    settling.settled(of("a"), now_s)
    waits = []
    for _ in range(6):
        arrived_s = now_s
        while "b" not in settling.settled(of("a", "b"), now_s):
            now_s += 0.25
        waits.append(now_s - arrived_s)
        now_s += 0.25
        assert settling.settled(of("a"), now_s) == of("a")
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_calm_times_shorten_the_wait_again() -> None:
    settling = Settling(base_s=1.0, limit_s=8.0)
    settling.settled(of("a"), 0.0)
    for start in (1.0, 3.0, 5.0):
        settling.settled(of("a", "b"), start)
        settling.settled(of("a"), start + 1)
    for now in range(7, 200):
        settling.settled(of("a"), float(now))
    assert settling.settled(of("a", "b"), 200.0) == of("a", "b")
