"""What Ray knows of the cluster's nodes. The few calls that Ray does not document as public are all in here."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state as gcs_state
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]  # generated

from raytrain_app.errors import ClusterError

ANSWER_S = 0.5
"""Longest wait for a raylet to answer."""


@dataclass(frozen=True)
class Node:
    """A living node.

    Attributes:
        node_id: Ray's id, hex.
        host: its address.
        resources: all it has for this run, by Ray's names.
        draining: it is going away; nothing new should start there.
        remaining_s: time left to a draining node; infinite if nobody said.
        port: where its raylet listens.
        shared: others hold a part of it.
    """

    node_id: str
    host: str
    resources: Mapping[str, float]
    draining: bool = False
    remaining_s: float = math.inf
    port: int = 0
    shared: bool = False


def living_nodes() -> list[Node]:
    """The nodes that Ray believes to be alive, in the order of their ids."""
    deadlines_ms, now_ms = gcs_state.get_draining_nodes(), time.time() * 1000
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            deadline_ms = deadlines_ms.get(node["NodeID"], 0)  # 0 where there is none
            remaining_s = (deadline_ms - now_ms) / 1000 if deadline_ms else math.inf
            host, draining = node["NodeManagerAddress"], node["NodeID"] in deadlines_ms
            nodes.append(Node(node["NodeID"], host, node["Resources"], draining, remaining_s, node["NodeManagerPort"]))
    return sorted(nodes, key=lambda node: node.node_id)


def raylet_is_gone(node: Node) -> bool:
    """Whether a node's raylet has ended, which Ray itself takes up to half a minute to see; False if it cannot be told."""
    try:
        socket.create_connection((node.host, node.port), timeout=ANSWER_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # nothing answers, as when the machine has vanished
        return False
    return False


def here() -> str:
    """Ray's id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def session_logs() -> Path:
    """Where Ray's processes of this node write their logs."""
    node: Any = ray._private.worker._global_node
    return Path(node.get_logs_dir_path())


def room(resources: Mapping[str, float], per_worker: Mapping[str, float]) -> int:
    """How many workers of `per_worker` fit into `resources`."""
    fits = [int(resources.get(name, 0.0) / amount + 1e-9) for name, amount in per_worker.items() if amount > 0]
    return min(fits, default=2**31)


def beside(nodes: Sequence[Node], first: str, cpus: float, count: int) -> list[Node]:
    """The nodes with what actors of `cpus` CPUs leave: the first one on node `first`, each other where most is left.

    Nothing is left anywhere when the actors do not fit: whoever needs them cannot run yet.
    """
    left = {node.node_id: node.resources.get("CPU", 0.0) for node in nodes if not node.draining}
    for number in range(count):
        chosen = first if number == 0 else max(left, key=lambda node_id: left[node_id], default="")
        if left.get(chosen, 0.0) < cpus:
            return [replace(node, resources={}) for node in nodes]
        left[chosen] -= cpus
    return [replace(node, resources={**node.resources, "CPU": left.get(node.node_id, 0.0)}) for node in nodes]


def drain_node(node_id: str, reason: str, remaining_s: float) -> None:
    """Tells Ray that a node goes away: nothing new starts there, and it ends once nothing runs on it any more.

    Args:
        node_id: Ray's id, hex.
        reason: a few words, shown by `ray list nodes`.
        remaining_s: time until the node is gone.

    Raises:
        ClusterError: Ray refused.
    """
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    deadline_ms = int((time.time() + remaining_s) * 1000)
    # Ray may refuse to drain a busy node for idleness, but never one that is going to be taken away.
    preemption = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, message = client.drain_node(node_id, preemption, reason, deadline_ms)
    if not accepted:
        raise ClusterError(f"Ray refused to drain node {node_id}: {message}")
