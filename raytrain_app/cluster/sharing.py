"""What a cluster's nodes have for this run, when other runs hold room on them as well.

Workers are in placement groups, and so are those of all other Ray libraries. Ray's own count of what is free lags behind and
changes with every task; who has which place is known at any time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ray
from ray.util import placement_group_table

from raytrain_app.cluster.nodes import Node

WISH = "raytrain-wish-"
"""How the names of placement groups begin that only tell the autoscaler what is lacking, and give their room back at once."""


@dataclass(frozen=True)
class Holdings:
    """Who holds room.

    Attributes:
        mine: names of this run's placement groups that have their place.
        others: resources that the others hold, by node id.
    """

    mine: frozenset[str]
    others: Mapping[str, Mapping[str, float]]

    def left(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes with what the others leave of them."""
        return [_less(node, self.others[node.node_id]) if node.node_id in self.others else node for node in nodes]


def prefix() -> str:
    """What the names of all placement groups of this driver's run begin with."""
    return f"raytrain-{ray.get_runtime_context().get_job_id()}-"


def holdings() -> Holdings:
    """Who holds room now."""
    mine, others, own = set(), defaultdict[str, dict[str, float]](dict), prefix()
    for entry in placement_group_table().values():
        if entry["state"] == "CREATED" and entry["name"].startswith(own):
            mine.add(entry["name"])
        elif entry["state"] == "CREATED" and not entry["name"].startswith(WISH):
            for number, bundle in entry["bundles"].items():
                held = others[entry["bundles_to_node_id"][number]]
                for resource, amount in bundle.items():
                    held[resource] = held.get(resource, 0.0) + amount
    return Holdings(frozenset(mine), dict(others))


def _less(node: Node, held: Mapping[str, float]) -> Node:
    left = {resource: amount - held.get(resource, 0.0) for resource, amount in node.resources.items()}
    return replace(node, resources=left, shared=True)
