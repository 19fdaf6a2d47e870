"""The actor that is the one authority on generations, and the run's mailbox between workers and driver.

Workers ask it for a generation at the start, after a failed collective, and when the flags in the reduced buffer say that
somebody waits or leaves. Whether a missing member is dead is asked of Ray: a call to a dead actor fails within
milliseconds. Only a silent one is judged by a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
import uuid
from collections.abc import Sequence
from typing import Any

import ray

from raytrain_app.elastic.liveness import Fate, fate, nodes_still_gone
from raytrain_app.elastic.mail import Dated, Mail, Signals, WorkerView
from raytrain_app.elastic.progress import UNDECIDED
from raytrain_app.elastic.receipts import CLASSES
from raytrain_app.elastic.roster import Generation, Roster, Standing, Worker, WorkerInfo
from raytrain_app.errors import RaytrainError

PING_S = 0.1
"""Pause between two rounds of asking Ray for missing workers; rounds happen only while a generation waits for them."""
POLL_S = 1.0
"""Longest wait of a worker's call for signals; each such call is also its heartbeat."""


class Membership:
    """See the module. All methods run in one event loop, so each is atomic between its awaits.

    Args:
        initial: workers that the first generation waits for.
        recorded: clock up to which the run's files already hold step records (a resumed run), else 0.
        deadline_s: seconds after which a silent or missing worker is evicted.
    """

    def __init__(self, initial: int, recorded: int, deadline_s: float) -> None:
        self._roster = Roster(initial)
        self._recorded = self._taken = recorded
        self._deadline_s = deadline_s
        self._incarnation = uuid.uuid4().hex
        self._places: dict[str, Generation] = {}
        self._changed = asyncio.Condition()
        self._version = 0
        self._broken = 0
        self._lost_nodes: set[str] = set()
        self._stop = self._checkpoint = False
        self._dataset: list[Any] = []
        self._over = False
        self._failure: RaytrainError | None = None
        self._events: list[dict[str, Any]] = []
        self._undelivered: list[tuple[int, dict[str, Any]]] = []
        self._summaries: dict[str, dict[str, Any]] = {}
        self._search: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    # ---- workers ----

    async def join(self, info: WorkerInfo, clock: int) -> Generation | None:
        """Waits for the next generation. Called by a worker that is in none; None means that the run is over for it."""
        if self._over_for(info.worker_id) or info.pool in self._roster.retired:
            return None
        if info.worker_id not in self._roster.workers:
            self._event(
                "join",
                worker=info.worker_id,
                pool=info.pool,
                node=info.node_id,
                host=info.host,
                pid=info.pid,
                starting_s=round(time.time() - info.started_time_s, 3),
                computes_on=info.kind,
            )
        self._roster.wait(info, clock, time.monotonic())
        self._places.pop(info.worker_id, None)
        await self._step_forward()
        async with self._changed:
            await self._changed.wait_for(lambda: info.worker_id in self._places or self._over_for(info.worker_id))
        return None if self._over_for(info.worker_id) else self._places[info.worker_id]

    async def signals(self, info: WorkerInfo, generation: int, clock: int, version: int, seconds: dict[str, float]) -> Signals:
        """The signals for a worker, as soon as they differ from `version`, else after `POLL_S`. Each call is a heartbeat.

        A restarted actor learns from these calls which workers are in which generation.
        """
        roster = self._roster
        if self._watch is None:
            self._watch = asyncio.ensure_future(self._watch_heartbeats())
        if generation > 0 and info.worker_id not in roster.workers:
            roster.adopt(info, generation, clock, time.monotonic())
        worker = roster.workers.get(info.worker_id)
        if worker is not None:
            worker.seen_s, worker.clock = time.monotonic(), max(worker.clock, clock)
            worker.spend(seconds)
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._version != version), POLL_S)
        return Signals(
            incarnation=self._incarnation,
            version=self._version,
            join=roster.newcomers(),
            leave=worker is not None and worker.leaving,
            checkpoint=self._checkpoint,
            stop=self._stop,
            abort=self._over_for(info.worker_id),
            recorded=self._recorded,
            broken=self._broken,
        )

    async def record(self, records: Sequence[Dated]) -> int:
        """Takes records. Of those with a clock (steps and epochs) each is taken once and none is passed over.

        Returns:
            Clock up to which records are here or with the driver; the sender sends again what comes after it.
        """
        for clock, record in records:
            if clock is None:
                self._events.append(record)
            elif clock == self._taken + 1:
                self._undelivered.append((clock, record))
                self._taken = clock
            self._checkpoint = self._checkpoint and record["kind"] != "checkpoint"
        await self._tell_driver()
        return self._taken

    async def written(self, clock: int) -> int:
        """Clock up to which the driver has written records, as soon as that is `clock`, else after `POLL_S`."""
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._recorded >= clock), POLL_S)
        return self._recorded

    async def leave(self, worker_id: str, seconds: dict[str, float]) -> None:
        """A worker that was asked to leave or park does so, at a step boundary; its next `join` tells it which."""
        self._roster.workers[worker_id].spend(seconds)
        self._roster.step_aside(worker_id)
        self._event("leave", worker=worker_id, workers=len(self._present()))
        await self._step_forward()

    async def done(self, worker_id: str, summary: dict[str, Any], seconds: dict[str, float]) -> None:
        """A worker finished the run; all do, with equal summaries."""
        if worker_id in self._roster.workers:  # else this actor was restarted just now and has not heard of it
            self._roster.workers[worker_id].spend(seconds)
            self._roster.remove(worker_id)
        self._summaries[worker_id] = summary
        self._over = self._over or not self._roster.missing()
        await self._tell()

    async def fail(self, error: RaytrainError) -> None:
        """Ends the run with an error; the first one counts."""
        if self._failure is None:
            self._failure = error
        self._over = True
        await self._tell()

    async def dataset(self) -> list[Any]:
        """What `open` brings, as soon as it does; empty if the run is over before."""
        # Workers come with handles that Ray Train's classes are needed to read: they are loaded while the workers start.
        asyncio.get_running_loop().run_in_executor(None, importlib.import_module, "ray.train")
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._dataset) or self._over)
        return self._dataset

    # ---- driver ----

    async def open(self, dataset: list[Any], recorded: int) -> None:
        """The run is on record and its data is read: workers that have started get it, and join.

        Args:
            dataset: reference of the data set, in a list so that it is not fetched on the way.
            recorded: clock up to which the run's files already hold step records.
        """
        self._dataset = dataset
        self._recorded = self._taken = max(self._recorded, recorded)
        await self._tell_driver()

    async def mail(self, recorded: int, timeout_s: float) -> Mail:
        """New records and the run's standing, as soon as there is something, else after `timeout_s`.

        Args:
            recorded: clock of the last record that the driver has written; workers keep what comes after it.
        """
        self._recorded = max(self._recorded, recorded)
        self._taken = max(self._taken, recorded)
        await self._tell_driver()  # and whoever waits in `written`
        # Kept until the driver says that it has them: an answer may be lost.
        self._undelivered = [(clock, record) for clock, record in self._undelivered if clock > recorded]
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: bool(self._events or self._undelivered) or self._over), timeout_s
                )
        events, self._events = self._events, []
        records: list[Dated] = [*((None, event) for event in events), *self._undelivered]
        records.sort(key=lambda dated: float(dated[1]["time"]))
        workers = [
            WorkerView(w.info.worker_id, w.info.pool, w.info.node_id, w.info.pid, w.standing, w.clock)
            for w in self._roster.workers.values()
            if w.standing is not Standing.GONE
        ]
        return Mail(
            records=records,
            failure=self._failure,
            summaries=list(self._summaries.values()) if self._over else [],
            workers=workers,
            incarnation=self._incarnation,
            stopping=self._stop,
            generation=self._roster.generation,
            lost_nodes=frozenset(self._lost_nodes),
            seconds=self._seconds(),
        )

    async def expect(self, initial: int) -> None:
        """Changes how many workers the first generation waits for."""
        self._roster.initial = initial
        await self._step_forward()

    async def request(self, *, stop: bool = False, checkpoint: bool = False) -> None:
        """Asks for a stop or a checkpoint; it happens at the next step boundary."""
        self._stop, self._checkpoint = self._stop or stop, self._checkpoint or checkpoint
        await self._tell()

    async def rearrange(self, *, park: Sequence[str] = (), unpark: Sequence[str] = (), retire: Sequence[int] = ()) -> None:
        """Asks workers to step aside, to come back, or whole pools to leave for good."""
        self._roster.park(park)
        self._roster.unpark(unpark)
        for pool in retire:
            self._roster.retire(pool)
        await self._step_forward()

    # ---- inside ----

    def _over_for(self, worker_id: str) -> bool:
        """Whether the run is over, or at least for this worker."""
        worker = self._roster.workers.get(worker_id)
        return self._over or (worker is not None and worker.standing is Standing.GONE)

    def _seconds(self) -> dict[str, float]:
        lifetimes = [worker.seconds for worker in self._roster.workers.values()]
        return {name: sum(seconds.get(name, 0.0) for seconds in lifetimes) for name in CLASSES}

    def _present(self) -> list[Worker]:
        return self._roster.standing(Standing.ACTIVE, Standing.WAITING)

    def _event(self, kind: str, **details: Any) -> None:
        self._events.append({"kind": kind, "time": time.time(), **details})

    async def _tell(self) -> None:
        self._version += 1
        await self._tell_driver()

    async def _tell_driver(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _step_forward(self) -> None:
        """Forms the next generation if it can be, else looks for those that are missing."""
        if self._summaries and not self._present():  # the last one was lost while it said goodbye; the others have finished
            self._over = True
        if self._roster.can_form():
            self._places = self._roster.form(self._recorded)
            self._event("generation", generation=self._roster.generation, workers=len(self._roster.members))
        elif self._search is None or self._search.done():
            self._search = asyncio.ensure_future(self._look_for_missing())
        await self._tell()

    async def _watch_heartbeats(self) -> None:
        """Looks after workers whose heartbeats stopped: asks after them at once, and evicts those that are silent for too long.

        This alone notices when all workers are lost together, since then nobody is left to report a failed collective.
        """
        while not self._over:
            await asyncio.sleep(min(POLL_S / 2, self._deadline_s / 4))
            quiet = {worker.info.worker_id: worker.seen_s for worker in self._present() if _silent_s(worker) > 1.5 * POLL_S}
            workers = [self._roster.workers[worker_id] for worker_id in quiet]
            lost = set(self._lost_nodes)
            fates, still_lost = await asyncio.gather(
                asyncio.gather(*(fate(worker.info) for worker in workers)), nodes_still_gone(lost)
            )
            self._lost_nodes -= lost - still_lost  # one that was only cut off is of use again
            for worker, found in zip(workers, fates, strict=True):
                if found is not Fate.ALIVE and worker.seen_s == quiet[worker.info.worker_id]:
                    self._bury(worker, found)
                elif _silent_s(worker) > self._deadline_s:
                    self._evict(worker, "silent")
            if any(worker.standing is Standing.GONE for worker in workers):
                await self._step_forward()

    async def _look_for_missing(self) -> None:
        """Asks Ray about every worker a generation waits for, until it can be formed; evicts those past the deadline."""
        started_s = time.monotonic()
        while self._roster.waits_for_members() and not self._roster.can_form() and not self._over:
            workers = self._present()
            fates = await asyncio.gather(*(fate(worker.info) for worker in workers))
            late = time.monotonic() - started_s > self._deadline_s
            for worker, found in zip(workers, fates, strict=True):
                if found is not Fate.ALIVE:
                    self._bury(worker, found)
                elif worker.standing is Standing.ACTIVE and late:
                    self._evict(worker, "missing")
            if not self._roster.can_form():
                await asyncio.sleep(PING_S)
        if self._roster.can_form() and not self._over:
            self._search = None
            await self._step_forward()

    def _bury(self, worker: Worker, found: Fate) -> None:
        """A worker is no more; its node may be gone too."""
        if found is Fate.LOST:
            self._lost_nodes.add(worker.info.node_id)
        self._evict(worker, "died")

    def _evict(self, worker: Worker, cause: str) -> None:
        """Takes a worker out of the job for good; its pool replaces it."""
        if worker.standing is Standing.GONE:  # it went while it was looked for
            return
        self._roster.remove(worker.info.worker_id)
        if worker.info.worker_id in self._roster.members:
            self._broken = self._roster.generation
        self._write_off(worker)
        if cause != "died":
            ray.kill(worker.info.handle)
        self._event(
            "worker_lost",
            worker=worker.info.worker_id,
            node=worker.info.node_id,
            cause=cause,
            generation=self._roster.generation,
            workers=len(self._present()),
        )

    @staticmethod
    def _write_off(worker: Worker) -> None:
        """What a worker did since it was last heard of, and the step that it was at, is not known to have counted."""
        seconds = worker.seconds
        seconds["redone"] = seconds.get("redone", 0.0) + seconds.pop(UNDECIDED, 0.0) + _silent_s(worker)


def _silent_s(worker: Worker) -> float:
    return time.monotonic() - worker.seen_s
