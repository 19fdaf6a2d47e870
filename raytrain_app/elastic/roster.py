"""Who is in the job, as plain data with pure rules: which generation can be formed, and with whom. No Ray in here."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any


class Standing(enum.Enum):
    """Where a worker stands."""

    WAITING = "waiting"  # asked for a generation
    ACTIVE = "active"  # in the current generation
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
        kind: what it computes on (CPU or GPU model, capability, library versions).
    """

    worker_id: str
    pool: int
    node_id: str
    pid: int
    host: str
    port: int
    handle: Any = field(compare=False)
    kind: dict[str, str] = field(default_factory=dict, compare=False)


@dataclass
class Worker:
    """The membership's view of one worker. `clock` counts what its replica has applied; -1 is a replica without state."""

    info: WorkerInfo
    standing: Standing
    clock: int
    joined: int
    seen_s: float
    leaving: bool = False
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """A fixed list of workers that reduce together, as told to one of them.

    Attributes:
        number: counts up from 1.
        rank: this worker's rank; rank 0 leads: it has the highest clock and its state goes to those behind.
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
        self._joins = 0

    def wait(self, info: WorkerInfo, clock: int, now_s: float) -> None:
        """A worker asks for a generation; `clock` is -1 while its replica has no state."""
        worker = self.workers.get(info.worker_id)
        if worker is None:
            self._joins += 1
            self.workers[info.worker_id] = Worker(info, Standing.WAITING, clock, self._joins, now_s)
        else:
            worker.standing, worker.clock, worker.seen_s = Standing.WAITING, clock, now_s

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
        return any(worker.info.worker_id not in self.members for worker in self.standing(Standing.WAITING))

    def missing(self) -> list[Worker]:
        """Members of the current generation that have not come for the next one."""
        return self.standing(Standing.ACTIVE)

    def can_form(self) -> bool:
        """The next generation forms when nobody of the last one is missing, and the first when all expected are there."""
        waiting = self.standing(Standing.WAITING)
        enough = len(waiting) >= (self.initial if self.generation == 0 else 1)
        return enough and not self.missing()

    def form(self, recorded: int) -> dict[str, Generation]:
        """Makes the next generation of all that wait: the furthest first, then by age; returns each worker's view."""
        order = sorted(self.standing(Standing.WAITING), key=lambda w: (-w.clock, w.joined))
        leader = order[0]
        self.generation += 1
        self.members = tuple(worker.info.worker_id for worker in order)
        behind = tuple(rank for rank, worker in enumerate(order) if rank > 0 and (worker.clock < leader.clock or worker.clock < 0))
        common = Generation(self.generation, 0, self.members, leader.info.host, leader.info.port, leader.clock, behind, recorded)
        for worker in order:
            worker.standing = Standing.ACTIVE
        return {worker_id: replace(common, rank=rank) for rank, worker_id in enumerate(self.members)}
