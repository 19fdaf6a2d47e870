"""A driver of its own, run by test_spot.py: two nodes, of which one gets a notice. Prints what it saw as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_app.cluster.nodes import living_nodes
from raytrain_app.cluster.spot import ensure_watchers
from tests.metadata import MetadataServer


class Work:
    """Keeps a node busy, as a worker does."""

    def pid(self) -> int:
        return os.getpid()


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    node_id = cluster.add_node(num_cpus=1).node_id
    ray.init(address=cluster.address, log_to_driver=False)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    work: Any = ray.remote(Work).options(num_cpus=1, scheduling_strategy=there).remote()
    ray.get(work.pid.remote())
    seen: dict[str, object] = {}
    with MetadataServer() as server:
        watchers: dict[str, ActorHandle[Any]] = {}
        for _ in range(3):
            ensure_watchers(watchers, [node.node_id for node in living_nodes()], server.host)
        seen["watched"] = list(watchers) == [node_id]
        _wait_for(lambda: server.requests > 2)
        seen["before"] = [node.draining for node in living_nodes()]
        started_s = time.monotonic()
        server.values["preempted"] = "TRUE"
        _wait_for(lambda: any(node.draining for node in living_nodes()))
        seen["noticed_s"] = time.monotonic() - started_s
        seen["draining"] = [node.node_id for node in living_nodes() if node.draining] == [node_id]
        ray.get(work.pid.remote())  # what runs there goes on
        ensure_watchers(watchers, [], server.host)
        seen["left"] = list(watchers)
        ray.kill(work)
        _wait_for(lambda: len(living_nodes()) == 1)  # and the node ends once nothing does
        ensure_watchers(watchers, [node_id], None)
        seen["without_host"] = list(watchers)
    ray.shutdown()
    cluster.shutdown()
    json.dump(seen, sys.stdout)


def _wait_for(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.05)


if __name__ == "__main__":
    main()
