"""What Ray knows of the cluster's nodes. The few calls that Ray does not document as public are all in here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import state as gcs_state
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]  # generated

from raytrain_app.errors import ClusterError


@dataclass(frozen=True)
class Node:
    """A living node.

    Attributes:
        node_id: Ray's id, hex.
        host: its address.
        resources: all it has, by Ray's names.
        draining: it is going away; nothing new should start there.
    """

    node_id: str
    host: str
    resources: Mapping[str, float]
    draining: bool = False


def living_nodes() -> list[Node]:
    """The nodes that Ray believes to be alive, in the order of their ids."""
    draining = gcs_state.get_draining_nodes()
    nodes = [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], node["NodeID"] in draining)
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: node.node_id)


def room(resources: Mapping[str, float], per_worker: Mapping[str, float]) -> int:
    """How many workers of `per_worker` fit into `resources`."""
    fits = [int(resources.get(name, 0.0) / amount + 1e-9) for name, amount in per_worker.items() if amount > 0]
    return min(fits, default=2**31)


def ask_autoscaler(workers: int, per_worker: Mapping[str, float]) -> None:
    """Tells the autoscaler, where there is one, to make room for that many workers in all; 0 takes the wish back."""
    from ray.autoscaler.sdk import request_resources

    bundle = {name: amount for name, amount in per_worker.items() if amount > 0}
    bundles: Sequence[dict[str, float]] = [bundle] * workers if bundle else []
    request_resources(bundles=list(bundles))


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
