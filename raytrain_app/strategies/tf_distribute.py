"""Groups of workers under tf.distribute, which are whole or nothing.

TensorFlow fixes the members of a multi-worker strategy when a process starts, and its collectives do not recover. So a
group that loses a worker ends, and another one, of new processes, goes on from the newest snapshot. Inside the group
`allreduce` trains; here is what differs around it.
"""

from __future__ import annotations

from raytrain_app.elastic.membership import Membership
from raytrain_app.elastic.roster import Generation, Roster, Standing, Worker, WorkerInfo


class GroupRoster(Roster):
    """A roster whose generations are always all workers of the newest pool."""

    def can_form(self) -> bool:
        return len(self.standing(Standing.WAITING)) >= self.initial and not self.missing()


class GroupMembership(Membership):
    """A membership whose generations are whole groups. A group's loss is told once, by the first worker that was lost."""

    def __init__(self, initial: int, recorded: int, deadline_s: float) -> None:
        super().__init__(initial, recorded, deadline_s)
        self._roster = GroupRoster(initial)
        self._lost: set[int] = set()

    async def join(self, info: WorkerInfo, clock: int) -> Generation | None:
        # A group is started when the last one has ended, so whoever is left of that one is gone.
        for worker in self._present():
            if worker.info.pool < info.pool:
                self._evict(worker, "died")
        return await super().join(info, clock)

    def _evict(self, worker: Worker, cause: str) -> None:
        if worker.info.pool not in self._lost:
            self._lost.add(worker.info.pool)
            super()._evict(worker, cause)
        elif worker.standing is not Standing.GONE:
            self._roster.remove(worker.info.worker_id)
            self._write_off(worker)
