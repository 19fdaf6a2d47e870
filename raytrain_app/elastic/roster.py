"""Who is in the job, as plain data with pure rules: which generation can be formed, and with whom. No Ray in here."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from raytrain_app.elastic.receipts import CLASSES


class Standing(enum.Enum):
    """Where a worker stands."""

    WAITING = "waiting"  # asked for a generation
    ACTIVE = "active"  # in the current generation
    PARKED = "parked"  # stepped aside when asked to; can come back at once
    GONE = "gone"  # left, lost, or done


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says of itself when it asks to join.

    Attributes:
        worker_id: unique for the process, such as "0.1-3f2a": pool 0, rank 1 of the pool, and a random part.
        pool: number of the pool that started it.
        node_id: Ray's id of its node.
        pid: its process id.
        host: address under which its peers reach it.
        port: port of its rendezvous store, used when it leads a generation.
        handle: Ray's handle of the actor it runs in.
        started_time_s: when it began, seconds since the epoch.
        kind: what it computes on (CPU or GPU model, capability, library versions).
        peers: workers that hold a replica together, itself among them; its pool are all of them.
        place: which part of the replica it holds, from 0.
    """

    worker_id: str
    pool: int
    node_id: str
    pid: int
    host: str
    port: int
    handle: Any = field(compare=False)
    started_time_s: float = 0.0
    kind: dict[str, str] = field(default_factory=dict, compare=False)
    peers: int = 1
    place: int = 0


@dataclass
class Worker:
    """The membership's view of one worker.

    Attributes:
        clock: steps and epoch ends that its replica has applied; -1 is a replica without state.
        joined: order of arrival.
        seen_s: when it was last heard of.
        leaving: it is asked to leave or park at the next step boundary.
        seconds: its lifetime by class, see `progress.Stopwatch`.
    """

    info: WorkerInfo
    standing: Standing
    clock: int
    joined: int
    seen_s: float
    leaving: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    def spend(self, seconds: dict[str, float]) -> None:
        """Takes over what the worker says, unless it is older than what is known: a heartbeat may come after a farewell."""
        if all(seconds.get(name, 0.0) >= self.seconds.get(name, 0.0) for name in CLASSES):
            self.seconds = seconds


@dataclass(frozen=True)
class Generation:
    """A fixed list of workers that reduce together, as told to one of them.

    Attributes:
        number: counts up from 1.
        rank: this worker's rank; rank 0 leads: it has the highest clock and its state goes to those behind. Workers that
            hold a replica together have consecutive ranks, in the order of their places.
        members: worker ids by rank.
        host, port: where the leader's rendezvous store listens.
        leader_clock: clock of the leader; -1 when no member has state, so the leader must restore or start afresh.
        behind: ranks whose state must come from the leader.
        recorded: clock up to which step records have reached the driver.
    """

    number: int
    rank: int
    members: tuple[str, ...]
    host: str
    port: int
    leader_clock: int
    behind: tuple[int, ...]
    recorded: int

    @property
    def world_size(self) -> int:
        return len(self.members)


class Roster:
    """All workers of a run, and the rule that forms generations.

    Args:
        initial: workers that the first generation waits for.
    """

    def __init__(self, initial: int) -> None:
        self.initial = initial
        self.generation = 0
        self.members: tuple[str, ...] = ()
        self.workers: dict[str, Worker] = {}
        self.retired: set[int] = set()
        self._joins = 0

    def wait(self, info: WorkerInfo, clock: int, now_s: float) -> None:
        """A worker asks for a generation; `clock` is -1 while its replica has no state."""
        worker = self.workers.get(info.worker_id)
        if worker is None:
            self._joins += 1
            self.workers[info.worker_id] = Worker(info, Standing.WAITING, clock, self._joins, now_s)
        else:
            worker.clock, worker.seen_s = clock, now_s
            if worker.standing is not Standing.PARKED:
                worker.standing = Standing.WAITING

    def step_aside(self, worker_id: str) -> None:
        """A worker that was asked to go does so: for good if its pool is retired, else until it is unparked."""
        worker = self.workers[worker_id]
        worker.standing = Standing.GONE if worker.info.pool in self.retired else Standing.PARKED
        worker.leaving = False

    def park(self, worker_ids: Iterable[str]) -> None:
        """Asks workers to step aside; one that only waits does so at once."""
        for worker in map(self.workers.__getitem__, worker_ids):
            if worker.standing is Standing.WAITING:
                worker.standing = Standing.PARKED
            elif worker.standing is Standing.ACTIVE:
                worker.leaving = True

    def unpark(self, worker_ids: Iterable[str]) -> None:
        """Lets parked workers wait for a generation again."""
        for worker in map(self.workers.__getitem__, worker_ids):
            worker.leaving = False
            if worker.standing is Standing.PARKED:
                worker.standing = Standing.WAITING

    def retire(self, pool: int) -> None:
        """All workers of a pool go for good: those in the generation at its next step boundary, the others at once."""
        self.retired.add(pool)
        for worker in self.workers.values():
            if worker.info.pool == pool and worker.standing is Standing.ACTIVE:
                worker.leaving = True
            elif worker.info.pool == pool:
                worker.standing = Standing.GONE

    def adopt(self, info: WorkerInfo, generation: int, clock: int, now_s: float) -> None:
        """A worker in `generation` is seen for the first time: this roster is new, and the generation older than it."""
        if generation < self.generation:
            return
        if generation > self.generation:
            self.generation, self.members = generation, ()
        self.wait(info, clock, now_s)
        self.workers[info.worker_id].standing = Standing.ACTIVE
        self.members = (*self.members, info.worker_id)

    def remove(self, worker_id: str) -> None:
        """A worker left, was lost, or is done."""
        self.workers[worker_id].standing = Standing.GONE

    def standing(self, *standings: Standing) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.standing in standings]

    def newcomers(self) -> bool:
        """Whether a worker waits that the current generation does not know of."""
        return any(worker.info.worker_id not in self.members for worker in self.ready())

    def waits_for_members(self) -> bool:
        """Whether members of the current generation are to come for the next one.

        They are not while all that waits is left over from a replica which has lost a worker.
        """
        return bool(self.ready()) or any(worker.info.worker_id in self.members for worker in self.standing(Standing.WAITING))

    def missing(self) -> list[Worker]:
        """Members of the current generation that have not come for the next one."""
        return self.standing(Standing.ACTIVE)

    def ready(self) -> list[Worker]:
        """Workers that wait, and whose replica is whole: one after the other, those furthest first, then by age."""
        replicas: dict[Any, list[Worker]] = {}
        for worker in self.standing(Standing.WAITING):
            replicas.setdefault(worker.info.pool if worker.info.peers > 1 else worker.info.worker_id, []).append(worker)
        whole = [
            sorted(replica, key=lambda w: w.info.place) for replica in replicas.values() if len(replica) == replica[0].info.peers
        ]
        whole.sort(key=lambda replica: (-min(w.clock for w in replica), min(w.joined for w in replica)))
        return [worker for replica in whole for worker in replica]

    def can_form(self) -> bool:
        """The next generation forms when nobody of the last one is missing, and the first when all expected are there."""
        enough = len(self.ready()) >= (self.initial if self.generation == 0 else 1)
        return enough and not self.missing()

    def form(self, recorded: int) -> dict[str, Generation]:
        """Makes the next generation of all that are ready, and returns each worker's view."""
        order = self.ready()
        leader = order[0]
        self.generation += 1
        self.members = tuple(worker.info.worker_id for worker in order)
        needs_state = [worker.clock < leader.clock or worker.clock < 0 for worker in order]
        behind = tuple(rank for rank in range(1, len(order)) if needs_state[rank])
        common = Generation(self.generation, 0, self.members, leader.info.host, leader.info.port, leader.clock, behind, recorded)
        for worker in order:
            worker.standing = Standing.ACTIVE
        return {worker_id: replace(common, rank=rank) for rank, worker_id in enumerate(self.members)}
