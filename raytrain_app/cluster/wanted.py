"""What a run lacks, made known to the autoscaler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from uuid import uuid4

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from raytrain_app.cluster.sharing import WISH

MOST = 32
"""Wishes at a time; the next ones follow when these are fulfilled."""


class WantedRoom:
    """Asks for room for workers on nodes that are not there yet.

    A wish is a placement group of one worker's resources, which is pending until there is a node for it. Ray's call for such
    wishes, `request_resources`, will not do: Ray Train makes its own with it and so takes ours back, and the autoscaler passes
    over one that it cannot fulfil as a whole, as for more workers than it may start nodes for.

    Without an autoscaler nothing comes of it.

    Args:
        per_worker: Ray resources by name.
    """

    def __init__(self, per_worker: Mapping[str, float]) -> None:
        self._bundle = {name: amount for name, amount in per_worker.items() if amount > 0}
        self._wishes: list[PlacementGroup] = []

    def ask(self, workers: int, there: Collection[str]) -> None:
        """Wishes for room for that many workers. To be called again and again while workers lack room.

        Args:
            workers: for whom there is no room.
            there: ids of the nodes that are there. Wishes must not take their room, which is for workers.
        """
        pending: list[PlacementGroup] = []
        for wish in self._wishes:
            # One that is fulfilled gives its room back at once.
            if len(pending) < workers and placement_group_table(wish)["state"] == "PENDING":
                pending.append(wish)
            else:
                remove_placement_group(wish)
        others = [{"ray.io/node-id": f"!in({','.join(sorted(there))})"}] if there else None
        for _ in range(min(workers, MOST) - len(pending) if self._bundle else 0):
            pending.append(placement_group([self._bundle], name=f"{WISH}{uuid4().hex}", bundle_label_selector=others))
        self._wishes = pending

    def close(self) -> None:
        """Takes all wishes back."""
        self.ask(0, ())
