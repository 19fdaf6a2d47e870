"""How many workers where: decisions as plain values, made by pure functions of what is known; `supervisor` acts on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HAND_OVER_S = 5.0
"""Time before a draining node's end at which its workers leave even if nobody else trains yet."""


@dataclass(frozen=True)
class PoolView:
    """A pool as the decisions see it.

    Attributes:
        number: of the pool.
        node_id: where it is.
        size: workers it was started with; it holds their resources until it ends.
        present: of them, those that train or wait to; the others are starting, parked, or being replaced.
        parked: of them, those that were asked to step aside.
        retiring: it has been asked to end.
        waiting: its workers have no place yet.
    """

    number: int
    node_id: str
    size: int
    present: int = 0
    parked: int = 0
    retiring: bool = False
    waiting: bool = False


@dataclass(frozen=True)
class Start:
    """Start a pool of `size` workers on a node."""

    node_id: str
    size: int


@dataclass(frozen=True)
class Park:
    """Let `count` workers of a pool step aside; they keep their places and can come back at once."""

    pool: int
    count: int


@dataclass(frozen=True)
class Unpark:
    """Let `count` parked workers of a pool come back."""

    pool: int
    count: int


@dataclass(frozen=True)
class Retire:
    """Let all workers of a pool leave at a step boundary and end it, which frees its resources.

    Attributes:
        pool: number of the pool.
        draining: why, if its node is going away.
    """

    pool: int
    draining: bool = False


@dataclass(frozen=True)
class Abort:
    """End a pool at once: its node is gone, or others were quicker to take the room there."""

    pool: int


Decision = Start | Park | Unpark | Retire | Abort


def decide(
    wanted: int, pools: Sequence[PoolView], rooms: Mapping[str, int], alive: frozenset[str], draining: Mapping[str, float]
) -> list[Decision]:
    """What to change so that `wanted` workers train.

    Args:
        wanted: workers that should train, at least 1.
        pools: the running pools.
        rooms: workers that each usable node could hold beside its pools, less than none if others took the room of some; nodes
            that are draining or too new are left out.
        alive: ids of living nodes.
        draining: seconds that are left to nodes which are going away, by id.

    Returns:
        Decisions that do not depend on each other's order.
    """
    hopeless = [pool for pool in pools if pool.node_id not in alive or (pool.waiting and rooms.get(pool.node_id, 0) < 0)]
    decisions: list[Decision] = [Abort(pool.number) for pool in hopeless]
    living = [pool for pool in pools if pool not in hopeless and not pool.retiring]
    staying = [pool for pool in living if pool.node_id not in draining]
    present = sum(pool.present for pool in staying)
    # Workers of a draining node leave when others are there to take over, or when the time comes.
    decisions += [
        Retire(pool.number, draining=True)
        for pool in living
        if pool.node_id in draining and (present > 0 or draining[pool.node_id] < HAND_OVER_S)
    ]
    coming = sum(pool.size - pool.parked for pool in staying)
    if coming < wanted:
        return decisions + _grow(wanted - coming, staying, rooms)
    return decisions + _shrink(present - wanted, staying)


def _grow(missing: int, pools: Sequence[PoolView], rooms: Mapping[str, int]) -> list[Decision]:
    decisions: list[Decision] = []
    for pool in pools:
        count = min(missing, pool.parked)
        if count:
            decisions.append(Unpark(pool.number, count))
            missing -= count
    for node_id, room in sorted(rooms.items(), key=lambda item: (-item[1], item[0])):
        count = min(missing, room)
        if count > 0:
            decisions.append(Start(node_id, count))
            missing -= count
    return decisions


def _shrink(surplus: int, pools: Sequence[PoolView]) -> list[Decision]:
    """Newest pools first, whole ones if they fit, since only a pool's end frees its node. Those that train now count."""
    decisions: list[Decision] = []
    for pool in sorted(pools, key=lambda pool: -pool.number):
        if 0 < pool.present <= surplus:
            decisions.append(Retire(pool.number))
            surplus -= pool.present
        elif pool.present and surplus > 0:
            decisions.append(Park(pool.number, surplus))
            surplus = 0
    return decisions


class Settling:
    """Hysteresis: in calm times a node is used at once; when nodes come and go, the next must stay for a while that grows.

    Args:
        base_s: how long a node must have stayed after one has died young.
        limit_s: the longest such time; a node that dies before it has stayed for so long dies young.
    """

    def __init__(self, base_s: float = 1.0, limit_s: float = 30.0) -> None:
        self._base_s, self._limit_s = base_s, limit_s
        self._first_seen_s: dict[str, float] = {}
        self._settle_s = 0.0
        self._calm_since_s = 0.0

    def settled(self, alive: frozenset[str], now_s: float) -> frozenset[str]:
        """Nodes that may be used. A node that dies young doubles the time for the next; a calm while halves it."""
        for node_id in [node_id for node_id in self._first_seen_s if node_id not in alive]:
            if self.is_young(node_id, now_s):
                self._settle_s = min(max(2 * self._settle_s, self._base_s), self._limit_s)
            del self._first_seen_s[node_id]
            self._calm_since_s = now_s
        if now_s - self._calm_since_s > 2 * self._limit_s:
            self._settle_s = self._settle_s / 2 if self._settle_s > self._base_s else 0.0
            self._calm_since_s = now_s
        first_look = not self._first_seen_s
        for node_id in alive:
            # Nodes that were there before the run need not prove themselves.
            self._first_seen_s.setdefault(node_id, now_s - self._limit_s if first_look else now_s)
        return frozenset(node_id for node_id in alive if now_s - self._first_seen_s[node_id] >= self._settle_s)

    def is_young(self, node_id: str, now_s: float) -> bool:
        """Whether a node has been there for less than `limit_s`, as far as is known."""
        return now_s - self._first_seen_s.get(node_id, now_s) < self._limit_s
