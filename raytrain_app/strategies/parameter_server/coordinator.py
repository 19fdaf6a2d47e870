"""The membership of a run with parameter servers: workers come and go alone; servers are found, kept and restored."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from raytrain_app.elastic.membership import Membership
from raytrain_app.elastic.roster import Generation, Roster, Standing
from raytrain_app.errors import TrainingError
from raytrain_app.strategies.parameter_server.shard import ShardState
from raytrain_app.strategies.parameter_server.stats import Numbers, report
from raytrain_app.strategies.parameter_server.table import Place, Table

WAIT_S = 1.0
"""Longest wait of a call for a table or a state."""
REPORT_S = 1.0
"""How often the servers' numbers are told."""
LOST_S = 20.0
"""How long a server looks for its state. There is none when the coordinator was lost too before it was given a newer one."""
OFFERS = 3
"""States of a server that wait for those of the others at the same version."""
FRUITLESS_RESTARTS = 20
"""Restarts of one server, without a new version between them, after which the run ends."""


@dataclass(frozen=True)
class Assignment:
    """What a server is to hold.

    Attributes:
        table: number of the table.
        servers: how many there are.
        state: of its range.
    """

    table: int
    servers: int
    state: ShardState


@dataclass(frozen=True)
class Beat:
    """What a server tells every now and then.

    Attributes:
        server: its number.
        table: number of the table that its range is from.
        servers: how many there are in that table.
        place: where it is.
        numbers: its counts.
        scored: with the lead, epochs whose validation is known.
        details: with the lead, values for the line of metrics.jsonl ("epoch", "step", ...).
    """

    server: int
    table: int
    servers: int
    place: Place
    numbers: Numbers
    scored: int
    details: dict[str, Any]


@dataclass(frozen=True)
class Orders:
    """What a server must know.

    Attributes:
        incarnation: changes when the coordinator was restarted, which has lost the states that it kept.
        table: number of the newest table; a server of an older one asks for its state again.
        kept: version of the server's state that is kept, -1 when there is none.
        scored: epochs whose validation is known.
        recorded: clock up to which the driver has written the step records.
        stop, checkpoint: asked of the run.
        over: the run has ended.
        workers: ids of those that train.
    """

    incarnation: str
    table: int
    kept: int
    scored: int
    recorded: int
    stop: bool
    checkpoint: bool
    over: bool
    workers: frozenset[str]


class FreeRoster(Roster):
    """Workers that do not wait for each other: whoever asks is taken in at once. A generation is a name for who is there."""

    def can_form(self) -> bool:
        present = self.standing(Standing.ACTIVE, Standing.WAITING)
        return {worker.info.worker_id for worker in present} != set(self.members) or bool(self.standing(Standing.WAITING))

    def form(self, recorded: int) -> dict[str, Generation]:
        present = sorted(self.standing(Standing.ACTIVE, Standing.WAITING), key=lambda worker: worker.joined)
        self.generation += 1
        self.members = tuple(worker.info.worker_id for worker in present)
        common = Generation(self.generation, 0, self.members, "", 0, -1, (), recorded)
        for worker in present:
            worker.standing = Standing.ACTIVE
        return {worker_id: replace(common, rank=rank) for rank, worker_id in enumerate(self.members)}

    def newcomers(self) -> bool:
        return False


class Coordinator(Membership):
    """See the module. Pinned to the driver's node like every membership, and restarted when it dies.

    It keeps the newest state of every range in its memory. A server that was restarted gets its own from here; a
    coordinator that was restarted gets them from the servers.
    """

    def __init__(self, initial: int, recorded: int, deadline_s: float) -> None:
        super().__init__(initial, recorded, deadline_s)
        self._roster = FreeRoster(initial)
        self._restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._table = self._servers = 0
        self._kept: dict[int, ShardState] = {}
        self._offered: dict[int, dict[int, ShardState]] = {}
        self._beats: dict[int, Beat] = {}
        self._restored: dict[int, tuple[int, int]] = {}
        self._told: dict[int, Numbers] = {}
        self._told_s = 0.0

    # ---- servers ----

    async def commit(self, table: int, states: Sequence[ShardState]) -> None:
        """Makes these states the truth, in one go: the first ones of the run, or the ranges cut anew.

        Args:
            table: number of the table that they belong to; nothing happens if there is one as new already.
            states: one a server, in order.
        """
        if table <= self._table:
            return
        copies = [await asyncio.to_thread(_copy, state) for state in states]
        if table <= self._table:  # the servers were rolled back while they were copied
            return
        self._kept = dict(enumerate(copies))
        self._offered.clear()
        self._table, self._servers = table, len(states)
        await self._tell()

    async def layout(self) -> tuple[int, int] | None:
        """Number of the newest table, and of its servers; None while a coordinator that was restarted has not heard of it."""
        await self._wait_for(lambda: self._servers > 0)
        return (self._table, self._servers) if self._servers else None

    async def roll_back(self, table: int, version: int, batch_size: int) -> None:
        """Makes the kept states the truth again, in bulk mode: some server lacks a part of a step before `version`, for good.

        Args:
            table: number of the table of which that is true.
            version: the highest one of a server: so many steps had been done.
            batch_size: rows of a step.
        """
        if table == self._table and len(self._kept) == self._servers:
            kept = self._kept[0].version
            self._table += 1
            self._offered.clear()
            steps = max(0, version - kept)
            self._event("roll_back", step=kept, steps=steps, samples=steps * batch_size)
            self._event("generation", generation=self._roster.generation, workers=len(self._roster.members))
            await self._tell()

    async def attach(self, server: int, waited_s: float) -> Assignment | None:
        """The state that a server is to hold; None when there is none yet, and it should ask again.

        Args:
            server: its number.
            waited_s: for how long it has been asking.
        """
        await self._wait_for(lambda: server in self._kept)
        if server not in self._kept:
            is_new = 0 < self._servers <= server  # it waits for ranges to be cut anew
            if self._restarted and not is_new and waited_s > LOST_S:
                await self.fail(TrainingError(_LOST.format(server=server)))
            return None
        state = self._kept[server]
        version, times = self._restored.get(server, (-1, 0))
        times = times + 1 if version == state.version else 1
        self._restored[server] = state.version, times
        if times > FRUITLESS_RESTARTS:
            await self.fail(TrainingError(_CRASHES.format(server=server, times=times - 1)))
        return Assignment(self._table, self._servers, state)

    async def keep(self, server: int, table: int, state: ShardState, *, together: bool = False) -> None:
        """Keeps a newer state of a server.

        Args:
            server: its number.
            table: number of the table that the state belongs to.
            state: what to keep.
            together: it is of use only with those of all other servers at the same version.
        """
        self._adopt(table)
        if table == self._table:
            copy = await asyncio.to_thread(_copy, state)
            if table == self._table:  # ranges may have been cut anew while the copy was made
                if together:
                    self._offer(server, copy)
                else:
                    self._kept[server] = copy

    async def kept(self) -> list[ShardState]:
        """The newest states of all servers; empty while some are not here."""
        return [self._kept[server] for server in range(self._servers)] if len(self._kept) == self._servers else []

    async def beat(self, beat: Beat) -> Orders:
        """A server is there. Each call tells where it is, which a restarted coordinator does not know."""
        self._adopt(beat.table)
        known = self._beats.get(beat.server)
        self._beats[beat.server] = beat
        self._servers = beat.servers if beat.table == self._table else self._servers
        if known is None or known.place != beat.place or known.table != beat.table:
            if known is not None and known.table == beat.table:
                self._event("server_lost", server=beat.server, node=known.place.node_id, pid=known.place.pid)
                self._event("generation", generation=self._roster.generation, workers=len(self._roster.members))
            await self._tell()
        if beat.server == 0 and beat.details:
            await self._report(beat.details)
        active = self._roster.standing(Standing.ACTIVE)
        return Orders(
            incarnation=self._incarnation,
            table=self._table,
            kept=self._kept[beat.server].version if beat.server in self._kept else -1,
            scored=lead.scored if (lead := self._beats.get(0)) is not None else 0,
            recorded=self._recorded,
            stop=self._stop,
            checkpoint=self._checkpoint,
            over=self._over,
            workers=frozenset(worker.info.worker_id for worker in active),
        )

    async def evict(self, worker_id: str, cause: str) -> None:
        """Takes a worker out, whatever it does; its pool replaces it."""
        for worker in self._present():
            if worker.info.worker_id == worker_id:
                self._evict(worker, cause)
                await self._step_forward()

    async def finish(self, summary: dict[str, Any]) -> None:
        """The run is over; the servers' word counts for all workers."""
        self._summaries["servers"] = summary
        self._over = True
        await self._tell()

    async def servers(self) -> list[dict[str, Any]]:
        """What the servers told last, as plain values."""
        return [
            {
                "server": number,
                "pid": beat.place.pid,
                "node": beat.place.node_id,
                "start": beat.place.start,
                "stop": beat.place.stop,
                **{name: beat.numbers[name] for name in ("pushes", "duplicates", "refused", "in_bytes", "out_bytes", "age_s")},
            }
            for number, beat in sorted(self._beats.items())
            if number < self._servers
        ]

    # ---- workers ----

    async def table(self, known: Table | None) -> Table | None:
        """Where the servers are, as soon as they are all there and not as in `known`; None after a while without."""
        await self._wait_for(lambda: self._whole_table() not in (None, known))
        table = self._whole_table()
        return table if table != known else None

    # ---- inside ----

    def _offer(self, server: int, state: ShardState) -> None:
        """Keeps the states of all servers at a version, once they are all here and not older than those that are kept."""
        offered = self._offered.setdefault(server, {})
        offered[state.version] = state
        for old in sorted(offered)[:-OFFERS]:
            del offered[old]
        servers, version = range(self._servers), state.version
        if not servers or any(version not in self._offered.get(number, ()) for number in servers):
            return
        if len(self._kept) == len(servers) and version < self._kept[0].version:
            return
        self._kept = {number: self._offered[number][version] for number in servers}
        for others in self._offered.values():
            for old in [known for known in others if known < version]:
                del others[old]

    def _whole_table(self) -> Table | None:
        beats = [self._beats.get(server) for server in range(self._servers)]
        places = tuple(beat.place for beat in beats if beat is not None and beat.table == self._table)
        return Table(self._table, places) if places and len(places) == self._servers else None

    def _adopt(self, table: int) -> None:
        """Learns of a newer table than this coordinator, which was restarted, has heard of."""
        if table > self._table:
            self._table = table
            self._kept.clear()
            self._offered.clear()

    async def _report(self, details: dict[str, Any]) -> None:
        """Adds a line about the servers to the run's records, every now and then."""
        now_s = time.monotonic()
        numbers = {server: beat.numbers for server, beat in self._beats.items() if server < self._servers}
        if now_s - self._told_s < REPORT_S or 0 not in numbers or not numbers[0]["pushes"]:
            return
        self._told_s = now_s
        line = report(self._told, numbers)
        self._told = numbers
        await self.record([(None, {"kind": "servers", "time": time.time(), **details, **line})])

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(condition), WAIT_S)


_CRASHES = (
    "parameter server {server} died {times} times without a step between; "
    "look at its log in Ray's session folder, and at its node's memory"
)
_LOST = (
    "parameter server {server} and the coordinator, which kept its state, were lost together; "
    "--resume goes on from the last checkpoint"
)


def _copy(state: ShardState) -> ShardState:
    """A copy in this process's own memory: what a call brings lies in the object store, and goes with its sender."""
    slots = {name: np.array(slot) for name, slot in state.slots.items()}
    ends = {epoch: _copy(end) for epoch, end in state.ends.items()}
    return replace(state, vector=np.array(state.vector), slots=slots, counters=np.array(state.counters), ends=ends)
