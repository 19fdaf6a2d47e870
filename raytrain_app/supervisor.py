"""Pools up and down: decides how many workers the cluster can give, starts them, and notices what became of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from raytrain_app.errors import ClusterError
from raytrain_app.job import Job
from raytrain_app.pool import Pool

CAPACITY_POLL_S = 0.5


def placeable(nodes: Sequence[Mapping[str, float]], per_worker: Mapping[str, float], limit: int) -> int:
    """How many workers fit on nodes with these resources, at most `limit`; a worker does not span nodes."""
    wanted = {name: amount for name, amount in per_worker.items() if amount > 0}
    if not wanted:
        return limit
    return min(limit, sum(min(math.floor(node.get(n, 0.0) / a + 1e-9) for n, a in wanted.items()) for node in nodes))


class Supervisor:
    """The pools of one run.

    Args:
        job: says how many workers, and what each takes.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.pools: list[Pool] = []

    def wait_for_capacity(self, tell: Callable[[str], None]) -> int:
        """Workers to start with: as many as the cluster has room for, within the job's limits.

        Raises:
            ClusterError: there was no room for the minimum within `scaling.wait_s`.
        """
        scaling, started_s, told = self._job.scaling, time.monotonic(), False
        while True:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            room = placeable(nodes, scaling.resources_per_worker, scaling.workers.max)
            if room >= scaling.workers.min:
                return room
            lack = _lack(self._job, room, nodes)
            if time.monotonic() - started_s >= scaling.wait_s:
                raise ClusterError(
                    f"{lack}, and no more came within scaling.wait_s = {scaling.wait_s:g} s; "
                    "add nodes, ask for fewer workers (scaling.workers), or for less per worker (scaling.resources_per_worker)"
                )
            if not told:
                tell(f"{lack}; waiting up to {scaling.wait_s:g} s for more")
                told = True
            time.sleep(CAPACITY_POLL_S)

    def start(self, size: int, body: Callable[[Any], None], argument: Callable[[int], Any]) -> None:
        """Starts a further pool; each of its workers runs `body(argument(pool number))`."""
        number = len(self.pools)
        self.pools.append(Pool(number, size, self._job, body, argument(number)))

    def failed(self) -> BaseException | None:
        """The error of a pool that ended with one."""
        return next((pool.error for pool in self.pools if pool.ended() and pool.error is not None), None)

    def close(self, timeout_s: float) -> bool:
        """Waits until all workers have returned; False when some have not in time."""
        deadline_s = time.monotonic() + timeout_s
        return all([pool.ended(max(0.0, deadline_s - time.monotonic())) for pool in self.pools])


def _lack(job: Job, room: int, nodes: Sequence[Mapping[str, float]]) -> str:
    per_worker = ", ".join(f"{name}: {amount:g}" for name, amount in job.scaling.resources_per_worker.items() if amount)
    has: dict[str, float] = {}
    for node in nodes:
        for name in job.scaling.resources_per_worker:
            has[name] = has.get(name, 0.0) + node.get(name, 0.0)
    total = ", ".join(f"{name}: {amount:g}" for name, amount in has.items())
    return (
        f"the job needs {job.scaling.workers.min} workers of {{{per_worker}}}, and the cluster has room for {room}: "
        f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} with {{{total}}} in all"
    )
