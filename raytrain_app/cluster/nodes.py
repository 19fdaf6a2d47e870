"""What Ray knows of the cluster's nodes. The few calls that Ray does not document as public are all in here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import state as gcs_state


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
