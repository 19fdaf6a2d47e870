"""One pool for all workers, for strategies whose group is whole or nothing (tf.distribute)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from raytrain_app.actors import Actor, wait_for
from raytrain_app.cluster.nodes import Node, room
from raytrain_app.cluster.sharing import holdings
from raytrain_app.cluster.wanted import WantedRoom
from raytrain_app.elastic.mail import Mail
from raytrain_app.errors import ClusterError
from raytrain_app.job import Job
from raytrain_app.pool import Pool
from raytrain_app.scaling import Decision, Retire, Start
from raytrain_app.supervisor import PoolBody

SETTLE_S = 10.0
"""How long there must be room for a larger group before the running one is ended for it."""
FAILED_STARTS = 3
"""Groups in a row that may end before all their workers were there."""


class GroupSupervisor:
    """Keeps a group running: one that lost a worker is followed by another, as large as there is room for.

    A group that could be larger, or is to be smaller, ends at a step boundary with its state safe, and is followed likewise.

    Args:
        job: says how many workers, and what each takes and computes on.
        membership: the run's membership actor.
        body: what the workers run.
    """

    def __init__(self, job: Job, membership: Actor, body: PoolBody) -> None:
        self._job, self._membership, self._body = job, membership, body
        self._pool: Pool | None = None
        self._started = 0
        self._complete = self._retired = False
        self._failed_starts = 0
        self._wanted = WantedRoom(job.scaling.resources_per_worker)
        self._lacking_since_s: float | None = None
        self._other_size_since_s: float | None = None

    def tend(self, mail: Mail, nodes: Sequence[Node], most: int) -> list[Decision]:
        """Starts a group if there is none, ends one of the wrong size, and returns what it did.

        Args:
            mail: the newest from the membership.
            nodes: those that are there.
            most: workers that should train if there is room.

        Raises:
            ClusterError: there is no room for a group, and none came within `scaling.wait_s`.
        """
        if self._pool is not None and self._pool.ended():
            self._bury(self._pool)
        nodes = holdings().left(nodes)
        self._wanted.ask(max(0, most - self._places(nodes)), [*mail.lost_nodes, *(node.node_id for node in nodes)])
        if self._pool is None:
            return self._start(nodes, most)
        present = sum(worker.pool == self._pool.number for worker in mail.workers)
        self._complete = self._complete or present == self._pool.size
        wanted, now_s = min(most, self._places(nodes)), time.monotonic()
        self._other_size_since_s = None if wanted == self._pool.size else self._other_size_since_s or now_s
        verdict = judge(self._pool.size, self._complete, wanted, now_s - (self._other_size_since_s or now_s))
        if verdict == "abort":
            self._pool.abort()
            self._pool = None
        elif verdict == "end" and not self._retired:
            self._retired = True
            wait_for(self._membership.rearrange.remote(retire=[self._pool.number]))
            return [Retire(self._pool.number)]
        return []

    def close(self, timeout_s: float) -> None:
        """Waits until all workers have returned, and ends those that have not in time."""
        if self._pool is not None and not self._pool.ended(timeout_s):
            self._pool.abort()
        self._wanted.close()

    def _bury(self, pool: Pool) -> None:
        self._failed_starts = 0 if self._complete else self._failed_starts + 1
        if self._failed_starts >= FAILED_STARTS:
            raise ClusterError(f"groups of tf.distribute end before they train: {' '.join(str(pool.error).split())}")
        self._pool = None

    def _start(self, nodes: Sequence[Node], most: int) -> list[Decision]:
        least, now_s = self._job.scaling.workers.min, time.monotonic()
        size = min(most, self._places(nodes))
        if size < least:
            if self._lacking_since_s is None:
                self._lacking_since_s = now_s
            if now_s - self._lacking_since_s > self._job.scaling.wait_s:
                raise ClusterError(
                    f"a group of tf.distribute needs at least {least} workers, and there is room for {size}; no more came within "
                    f"scaling.wait_s = {self._job.scaling.wait_s:g} s. Add nodes and go on with --resume"
                )
            return []
        self._lacking_since_s = None
        number, self._started = self._started, self._started + 1
        wait_for(self._membership.expect.remote(size))
        self._complete = self._retired = False
        self._pool = Pool(number, size, None, self._job, self._body.run, self._body.argument(number))
        return [Start("any", size)]

    def _places(self, nodes: Sequence[Node]) -> int:
        """Workers that the cluster could hold in all."""
        per_worker = self._job.scaling.resources_per_worker
        return sum(room(node.resources, per_worker) for node in nodes if not node.draining)


def judge(size: int, complete: bool, wanted: int, since_s: float) -> Literal["keep", "end", "abort"]:
    """What to do with a running group.

    Args:
        size: workers it was started with.
        complete: all of them have come.
        wanted: workers that a group started now would have.
        since_s: seconds for which that has been another number.

    Returns:
        "end" at a step boundary, for a group of another size; "abort" at once, since the node that it waits for is gone.
    """
    if wanted < size:
        return "end" if complete else "abort"
    return "end" if complete and wanted > size and since_s > SETTLE_S else "keep"
