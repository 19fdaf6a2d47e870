"""Spot and maintenance notices of Google Compute Engine, turned into a drain of the Ray node they are about.

Ray itself does not read the metadata server. Without this a reclaimed machine is a lost one; with it the workers on it leave
at a step boundary in the seconds that the notice gives.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_app.cluster.nodes import drain_node
from raytrain_app.errors import ClusterError
from raytrain_app.google import read_metadata

POLL_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Notice:
    """A machine will be taken away.

    Attributes:
        reason: a few words.
        remaining_s: time that the machine has left, at least.
    """

    reason: str
    remaining_s: float


# https://cloud.google.com/compute/docs/instances/spot: 30 s from the notice to the end.
# https://cloud.google.com/compute/docs/instances/getting-live-migration-notifications: 60 s, machines with GPUs an hour.
# A machine that is migrated live, the other value of maintenance-event, keeps its processes and needs nothing.
NOTICES = {
    ("preempted", "TRUE"): Notice("spot machine is being reclaimed", 30.0),
    ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"): Notice("machine stops for host maintenance", 60.0),
}


def read_notice(host: str) -> Notice | None:
    """The notice that the metadata server at `host` has for the machine that asks, if there is one.

    Raises:
        OSError: the server does not answer.
    """
    for (key, value), notice in NOTICES.items():
        if read_metadata(host, f"instance/{key}") == value:
            return notice
    return None


class SpotWatcher:
    """An actor on the node it watches.

    Args:
        node_id: Ray's id of that node, hex.
        host: the metadata server's address.
    """

    def __init__(self, node_id: str, host: str) -> None:
        self._node_id, self._host = node_id, host

    def watch(self) -> Notice:
        """Waits for a notice, drains the node, and returns the notice."""
        pause_s = POLL_S
        while True:
            try:
                notice = read_notice(self._host)
                if notice is not None:
                    drain_node(self._node_id, notice.reason, notice.remaining_s)
                    return notice
                pause_s = POLL_S
            except (OSError, ClusterError, RayError):
                # The run goes on without notices while nobody answers, as it would elsewhere; a drain is tried again.
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            time.sleep(pause_s)


def ensure_watchers(watchers: dict[str, ActorHandle[Any]], node_ids: Collection[str], host: str | None) -> None:
    """Starts a watcher on each of the nodes that has none yet, and ends those on other nodes. Returns at once.

    A watcher makes its node look busy to the autoscaler, so `node_ids` should be the nodes that the run's workers are on.

    Args:
        watchers: those running, by node id; changed by this call and kept by the caller for the next.
        node_ids: nodes to watch. The driver's own is left out: a run does not outlive it, so a drain would gain nothing.
        host: from `google.metadata_host()`; without one there is nothing to watch.
    """
    wanted = set(node_ids) - {ray.get_runtime_context().get_node_id()} if host else set[str]()
    for node_id in watchers.keys() - wanted:
        with contextlib.suppress(RayError):
            ray.kill(watchers.pop(node_id))
    for node_id in wanted - watchers.keys():
        actor = ray.remote(SpotWatcher).options(
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        watcher: Any = actor.remote(node_id, host)
        watchers[node_id] = watcher
        watcher.watch.remote()
