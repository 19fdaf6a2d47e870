"""How one server's state gets to where it survives the server."""

from __future__ import annotations

import math
import time
from typing import Any

from raytrain_app.actors import Actor, wait_for
from raytrain_app.strategies.parameter_server.conductor import Conductor
from raytrain_app.strategies.parameter_server.coordinator import Orders
from raytrain_app.strategies.parameter_server.desk import Desk
from raytrain_app.strategies.parameter_server.shard import ShardState

KEEP_S = 0.5
"""Shortest pause between two states that are sent to the coordinator."""
KEEP_SHARE = 0.05
"""Part of the time that sending them may take."""


class Keeper:
    """Has the coordinator keep a server's state, as often as is worth it. `tick` is called by one thread.

    Asynchronous servers send what they hold at the moment, each by itself. In bulk mode a state is of use only together with
    those of all other servers at the same version, so all of them send theirs at versions that they agree on without a word:
    multiples of a power of two, ends of epochs, and where they have stood still. The coordinator goes on from the newest
    version that it has of all.

    Args:
        number: of the server.
        desk: of the server.
        coordinator: the run's coordinator.
        conductor: with the lead.
    """

    def __init__(self, number: int, desk: Desk, coordinator: Actor, conductor: Conductor | None) -> None:
        self._number, self._desk, self._coordinator, self._conductor = number, desk, coordinator, conductor
        self._incarnation = ""
        self._sent_s = self._cost_s = 0.0
        self._sent_mark: Any = None
        self._snapshots: list[ShardState] = []
        self._paced, self._paced_s = 0, time.monotonic()
        self._still: Any = None
        self._still_s = 0.0

    def take_up(self, state: ShardState) -> None:
        """The server begins with a state that the coordinator keeps."""
        self._snapshots = [state]
        self._sent_mark = None
        if self._conductor is not None:
            self._conductor.take_up(state)

    def tick(self, orders: Orders, urgent: bool) -> None:
        """Learns what is kept, and sends what should be.

        Args:
            orders: the coordinator's last ones.
            urgent: somebody waits until the state is kept.
        """
        if orders.table != self._desk.table:
            return
        self._desk.durable = max(self._desk.durable, orders.kept)
        self._desk.scored = orders.scored
        if self._conductor is not None:
            self._conductor.kept(orders.kept)
        is_new, self._incarnation = orders.incarnation != self._incarnation, orders.incarnation
        if self._desk.is_bulk:
            self._keep_snapshots(orders, is_new, urgent or orders.stop)
        elif is_new or urgent or (self._is_time() and self._mark() != self._sent_mark):
            self._keep_newest()

    @property
    def _pause_s(self) -> float:
        return max(KEEP_S, self._cost_s / KEEP_SHARE)

    def _is_time(self) -> bool:
        return time.monotonic() - self._sent_s >= self._pause_s

    def _keep_newest(self) -> None:
        with self._desk.lock:
            if self._desk.table < 0:
                return
            assert self._desk.shard is not None, "a table without a range"
            mark, versions, state = self._mark(), self._desk.shard.versions, self._desk.state(copy=False)
            pinned = versions.pin()
        started_s = time.monotonic()
        try:
            kept = self._coordinator.keep.remote(self._number, self._desk.table, state)  # copies it
        finally:
            with self._desk.lock:
                versions.unpin(pinned)
        self._sent(kept, started_s, state, mark)

    # ---- bulk mode ----

    def _keep_snapshots(self, orders: Orders, is_new: bool, urgent: bool) -> None:
        """Sends the newest snapshot; a coordinator that was restarted gets all that it may need."""
        self._snapshots = [state for state in self._snapshots if state.version >= orders.kept] or self._snapshots[-1:]
        for known in self._snapshots if is_new else ():
            wait_for(self._coordinator.keep.remote(self._number, self._desk.table, known, together=True))
        self._set_pace()
        with self._desk.lock:
            if self._desk.table < 0:
                return
            mark, state = None, self._desk.take_snapshot()
            if state is None and self._stands_still(urgent) and self._still != self._sent_mark:
                mark, state = self._still, self._desk.snapshot_now()
        if state is not None:
            # The oldest one is kept together with those of the others; of what comes after it the last two are enough.
            self._snapshots = [*self._snapshots[:1], *self._snapshots[1:][-1:], state]
            started_s = time.monotonic()
            kept = self._coordinator.keep.remote(self._number, self._desk.table, state, together=True)
            self._sent(kept, started_s, state, mark)

    def _stands_still(self, urgent: bool) -> bool:
        """Whether nothing has changed for so long that the other servers stand at the same version."""
        mark, now_s = self._mark(), time.monotonic()
        if mark != self._still:
            self._still, self._still_s = mark, now_s
            return False
        return urgent or (now_s - self._still_s >= self._pause_s and self._is_time())

    def _set_pace(self) -> None:
        """Chooses how many versions lie between two snapshots, by how fast they come."""
        shard, now_s = self._desk.shard, time.monotonic()
        passed_s = now_s - self._paced_s
        if shard is None or passed_s < KEEP_S:
            return
        versions = max(0, shard.version - self._paced) / passed_s * self._pause_s
        self._desk.snapshot_every = 1 << max(0, math.ceil(math.log2(max(1.0, versions))))
        self._paced, self._paced_s = shard.version, now_s

    # ---- both ----

    def _sent(self, kept: Any, started_s: float, state: ShardState, mark: Any) -> None:
        wait_for(kept)
        if self._conductor is not None:
            self._conductor.sent(state)
        self._sent_mark, self._sent_s = mark, time.monotonic()
        self._cost_s = self._sent_s - started_s

    def _mark(self) -> Any:
        """Differs when something has changed."""
        shard, lead = self._desk.shard, self._desk.lead
        assert shard is not None, "nothing is kept before there is something"
        return shard.version, len(shard.applied), (lead.progress.clock, lead.ledger.next) if lead is not None else None
