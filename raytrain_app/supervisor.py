"""Pools up and down: looks at the cluster and at who trains, and acts on the decisions of `scaling`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import ray

from raytrain_app.actors import Actor, wait_for
from raytrain_app.cluster.launches import LaunchFailures
from raytrain_app.cluster.nodes import Node, beside, living_nodes, raylet_is_gone, room
from raytrain_app.cluster.sharing import Holdings, holdings
from raytrain_app.cluster.spot import ensure_watchers
from raytrain_app.cluster.wanted import WantedRoom
from raytrain_app.elastic.mail import Mail, WorkerView
from raytrain_app.elastic.roster import Standing
from raytrain_app.errors import ClusterError
from raytrain_app.google import metadata_host
from raytrain_app.job import Job
from raytrain_app.job.strategies import ParameterServer
from raytrain_app.pool import Pool, start_controller
from raytrain_app.scaling import Abort, Decision, Park, PoolView, Retire, Settling, Start, Unpark, decide

CAPACITY_POLL_S = 0.5
ABORT_S = 2.0
"""How long the clearing up after a pool that was ended may take."""
POOL_FAILURES = 5
"""Pools that Ray Train may give up on in a run, for errors of its own; each time another pool takes its place."""


@dataclass(frozen=True)
class PoolBody:
    """What each worker of a pool runs: `run(argument(pool number))`."""

    run: Callable[[Any], None]
    argument: Callable[[int], Any]


def wait_for_capacity(job: Job, tell: Callable[[str], None]) -> int:
    """Workers to start with: as many as the cluster has room for, within the job's limits.

    Args:
        job: says how many workers, what each takes, and how long to wait.
        tell: called with a sentence when it has to wait, and with each reason why machines do not come.

    Raises:
        ClusterError: there was no room for the minimum within `scaling.wait_s`.
    """
    scaling, started_s, told = job.scaling, time.monotonic(), False
    failures = LaunchFailures()
    with closing(WantedRoom(scaling.resources_per_worker)) as wanted:
        while True:
            nodes = [node for node in _for_workers(job, holdings().left(living_nodes())) if not node.draining]
            places = min(scaling.workers.max, _places(job, nodes))
            if places >= scaling.workers.min:
                return places
            lack = _lack(job, places, nodes)
            if time.monotonic() - started_s >= scaling.wait_s:
                why = f": {failures.reason}" if failures.reason else ""
                raise ClusterError(
                    f"{lack}, and no more came within scaling.wait_s = {scaling.wait_s:g} s{why}; "
                    "add nodes, ask for fewer workers (scaling.workers), or for less per worker (scaling.resources_per_worker)"
                )
            if not told:
                tell(f"{lack}; waiting up to {scaling.wait_s:g} s for more")
                told = True
            wanted.ask(scaling.workers.max - places, [node.node_id for node in nodes])
            if reason := failures.news():
                tell(reason)
            time.sleep(CAPACITY_POLL_S)


class Supervisor:
    """The pools of one run.

    Args:
        job: says what each worker takes and computes on.
        membership: the run's membership actor.
        body: what the workers run.
    """

    def __init__(self, job: Job, membership: Actor, body: PoolBody) -> None:
        self._job, self._membership, self._body = job, membership, body
        self._pools: dict[int, Pool] = {}
        self._started = 0
        self._retiring: set[int] = set()
        self._failures = 0
        self._settling = Settling()
        self._wanted = WantedRoom(job.scaling.resources_per_worker)
        self._lacking_since_s: float | None = None
        self._incarnation = ""
        self._watchers: dict[str, Actor] = {}
        self._controller: Actor | None = None  # of the next pool
        self._metadata_host = metadata_host()

    def tend(self, mail: Mail, nodes: Sequence[Node], most: int) -> list[Decision]:
        """Compares what is with what should be, acts on the difference, and returns what it did.

        Args:
            mail: the newest from the membership.
            nodes: those that are there.
            most: workers that should train if there is room.

        Raises:
            ClusterError: Ray Train gave up on too many pools, or nobody trains and there was no room for the minimum of workers
                for `scaling.wait_s`.
        """
        self._bury()
        # Ray is slow to see that a node is gone; among those that come and go there may be some.
        nodes = [node for node in nodes if not (self._settling.is_young(node.node_id, time.monotonic()) and raylet_is_gone(node))]
        held = holdings()
        nodes = _for_workers(self._job, held.left(nodes))
        decisions = self._decide(nodes, held, mail.workers, most)
        for decision in decisions:
            self._act(decision, mail.workers)
        if not mail.generation and any(isinstance(decision, Abort) for decision in decisions):
            coming = sum(pool.size for pool in self._pools.values())  # the others may be long in coming
            wait_for(self._membership.expect.remote(max(coming, self._job.scaling.workers.min)))
        if mail.incarnation != self._incarnation:  # a restarted membership has forgotten what it was asked
            self._incarnation = mail.incarnation
            wait_for(self._membership.rearrange.remote(retire=sorted(self._retiring)))
        ensure_watchers(self._watchers, {str(pool.node_id) for pool in self._pools.values()}, self._metadata_host)
        places = _places(self._job, [node for node in nodes if not node.draining])
        self._give_up_in_time(places, nodes, mail.workers)
        self._wanted.ask(max(0, most - places), [*mail.lost_nodes, *(node.node_id for node in nodes)])
        if self._controller is None and mail.generation and sum(pool.size for pool in self._pools.values()) < most:
            self._controller = start_controller()  # so that a node that comes is used sooner
        return decisions

    def close(self, timeout_s: float) -> None:
        """Waits until all workers have returned, and ends those that have not in time."""
        deadline_s = time.monotonic() + timeout_s
        for pool in self._pools.values():
            if not pool.ended(max(0.0, deadline_s - time.monotonic())):
                pool.abort()
        for pool in self._pools.values():  # a pool that was ended has things to clear away
            pool.ended(ABORT_S)
        if self._controller is not None:
            ray.kill(self._controller)
        ensure_watchers(self._watchers, (), None)
        self._wanted.close()

    def _give_up_in_time(self, places: int, nodes: Sequence[Node], workers: Sequence[WorkerView]) -> None:
        """Workers that are there train on, however few; without any, the minimum is waited for as at the start."""
        scaling, now_s = self._job.scaling, time.monotonic()
        if workers or places >= scaling.workers.min:
            self._lacking_since_s = None
            return
        self._lacking_since_s = self._lacking_since_s or now_s
        if now_s - self._lacking_since_s > scaling.wait_s:
            raise ClusterError(
                f"all workers are lost, {_lack(self._job, places, nodes)}, and no more came within "
                f"scaling.wait_s = {scaling.wait_s:g} s; add nodes and go on with --resume"
            )

    def _bury(self) -> None:
        for number, pool in list(self._pools.items()):
            if pool.ended():
                del self._pools[number]
                if pool.error is not None:
                    self._failures += 1
                    if self._failures > POOL_FAILURES:
                        reason = " ".join(str(pool.error).split())
                        raise ClusterError(f"Ray Train gave up on {self._failures} worker pools, the last time since: {reason}")

    def _decide(self, nodes: Sequence[Node], held: Holdings, workers: Sequence[WorkerView], most: int) -> list[Decision]:
        """What to start and end, with replicas for units: most often those are single workers."""
        unit, alive = self._job.replica_workers, frozenset(node.node_id for node in nodes)
        draining = {node.node_id: node.remaining_s for node in nodes if node.draining}
        settled = self._settling.settled(alive, time.monotonic())
        counts = Counter((worker.pool, worker.standing is Standing.PARKED) for worker in workers)
        views = [
            PoolView(
                number=pool.number,
                node_id=str(pool.node_id),
                size=pool.size // unit,
                present=counts[pool.number, False] // unit,
                parked=counts[pool.number, True] // unit,
                retiring=pool.number in self._retiring,
                waiting=not pool.has_place(held),
            )
            for pool in self._pools.values()
        ]
        per_worker = self._job.scaling.resources_per_worker
        rooms = {
            node.node_id: room(node.resources, per_worker) // unit
            - sum(view.size for view in views if view.node_id == node.node_id)
            for node in nodes
            if node.node_id in settled and not node.draining
        }
        decisions = decide(max(1, most // unit), views, rooms, alive, draining)
        if unit == 1:
            return decisions
        # A pool holds one replica, so several to start are several pools.
        return [part for decision in decisions for part in _replicas(decision, unit)]

    def _act(self, decision: Decision, workers: Sequence[WorkerView]) -> None:
        def of_pool(pool: int, *standings: Standing) -> list[str]:
            return [worker.worker_id for worker in workers if worker.pool == pool and worker.standing in standings]

        rearrange: Any = self._membership.rearrange.remote
        if isinstance(decision, Start):
            number, self._started = self._started, self._started + 1
            controller, self._controller = self._controller, None
            self._pools[number] = Pool(
                number, decision.size, decision.node_id, self._job, self._body.run, self._body.argument(number), controller
            )
        elif isinstance(decision, Abort):
            self._pools.pop(decision.pool).abort()
        elif isinstance(decision, Retire):
            self._retiring.add(decision.pool)
            wait_for(rearrange(retire=[decision.pool]))
        elif isinstance(decision, Park):
            training = of_pool(decision.pool, Standing.ACTIVE, Standing.WAITING)
            wait_for(rearrange(park=training[len(training) - decision.count :]))
        elif isinstance(decision, Unpark):
            wait_for(rearrange(unpark=of_pool(decision.pool, Standing.PARKED)[: decision.count]))


def _places(job: Job, nodes: Sequence[Node]) -> int:
    """Workers that nodes have room for; those of a replica are on one node."""
    unit = job.replica_workers
    return sum(room(node.resources, job.scaling.resources_per_worker) // unit * unit for node in nodes)


def _replicas(decision: Decision, unit: int) -> Sequence[Decision]:
    return [Start(decision.node_id, unit)] * decision.size if isinstance(decision, Start) else [decision]


def _for_workers(job: Job, nodes: Sequence[Node]) -> Sequence[Node]:
    """The nodes with what they have for workers: what the job's parameter servers take is theirs."""
    strategy = job.strategy
    if not isinstance(strategy, ParameterServer) or not strategy.server_cpus:
        return nodes
    return beside(nodes, ray.get_runtime_context().get_node_id(), strategy.server_cpus, strategy.servers)


def _lack(job: Job, places: int, nodes: Sequence[Node]) -> str:
    per_worker = {name: amount for name, amount in job.scaling.resources_per_worker.items() if amount}
    needed = ", ".join(f"{name}: {amount:g}" for name, amount in per_worker.items())
    alike = f", with the {job.replica_workers} of each replica on one node" if job.replica_workers > 1 else ""
    total = ", ".join(f"{name}: {sum(node.resources.get(name, 0.0) for node in nodes):g}" for name in per_worker)
    shared = ", which is what others on the cluster leave" if any(node.shared for node in nodes) else ""
    return (
        f"the job needs {job.scaling.workers.min} worker{'s' if job.scaling.workers.min > 1 else ''} of {{{needed}}}, "
        f"and the cluster has room for {places}{alike}: "
        f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} with {{{total}}} in all{_beside(job)}{shared}"
    )


def _beside(job: Job) -> str:
    strategy = job.strategy
    if not isinstance(strategy, ParameterServer) or not strategy.server_cpus:
        return ""
    servers = f"{strategy.servers} parameter server{'s' if strategy.servers > 1 else ''}"
    return f" beside {servers} of {{CPU: {strategy.server_cpus:g}}}"
