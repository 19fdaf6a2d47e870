"""What a server counts, and the line of metrics.jsonl that all servers' counts make together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Upper ends of the histogram's buckets; the last one takes what is above."""

Numbers = Mapping[str, Any]
"""`Stats.read` of one server."""


@dataclass
class Stats:
    """Totals since the server started. Changed under the server's lock.

    Attributes:
        pushes: applied.
        duplicates: pushes that had been applied before.
        refused: pushes that were too old.
        replayed: pushes sent again after the server was restored.
        staleness: applied pushes by the updates that they missed.
        gap: how far the parameters had moved under the gradient that was looked at last (root mean square).
        in_bytes, out_bytes: gradients and parameters moved.
        waited, waited_s: requests for a lease that had to wait, and for how long.
        seen_s: by worker, when it last pushed.
    """

    pushes: int = 0
    duplicates: int = 0
    refused: int = 0
    replayed: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    gap: float = 0.0
    in_bytes: int = 0
    out_bytes: int = 0
    waited: int = 0
    waited_s: float = 0.0
    seen_s: dict[str, float] = field(default_factory=dict)

    def read(self) -> dict[str, Any]:
        """A copy as plain values: `age_s` instead of `seen_s`, and `time_s`, when it was read."""
        now_s = time.monotonic()
        values = {name: value for name, value in vars(self).items() if name != "seen_s"}
        ages = {worker: round(now_s - seen_s, 3) for worker, seen_s in self.seen_s.items()}
        return {**values, "staleness": dict(self.staleness), "age_s": ages, "time_s": now_s}


def report(before: Mapping[int, Numbers], now: Mapping[int, Numbers]) -> dict[str, Any]:
    """What all servers did between two looks.

    Args:
        before: earlier numbers by server. One that is not in there, or was restarted since, counts from zero.
        now: the newest numbers by server; server 0 must be in there. It sees every push, as do all others.
    """
    earlier = {server: _if_before(before.get(server), numbers) for server, numbers in now.items()}
    lead, was = now[0], earlier[0]
    seconds = max(lead["time_s"] - was.get("time_s", lead["time_s"] - 1.0), 1e-3)
    staleness: Counter[int] = Counter(lead["staleness"])
    staleness.subtract(was.get("staleness", {}))
    moved = {
        name: sum(numbers[name] - earlier[server].get(name, 0) for server, numbers in now.items()) / seconds
        for name in ("in_bytes", "out_bytes")
    }
    return {
        "servers": len(now),
        "rounds_per_s": round((lead["pushes"] - was.get("pushes", 0)) / seconds, 1),
        "in_bytes_per_s": round(moved["in_bytes"]),
        "out_bytes_per_s": round(moved["out_bytes"]),
        "staleness_counts": bucketed(staleness),
        "staleness_median": quantile(staleness, 0.5),
        "staleness_p95": quantile(staleness, 0.95),
        "staleness_max": quantile(staleness, 1.0),
        "gap": max(numbers["gap"] for numbers in now.values()),
        "duplicates": sum(numbers["duplicates"] for numbers in now.values()),
        "replayed": sum(numbers["replayed"] for numbers in now.values()),
        "waited": lead["waited"],
        "waited_s": round(lead["waited_s"], 3),
        "age_max_s": max(lead["age_s"].values(), default=0.0),
        "ages": [{"worker": worker, "age_s": age_s} for worker, age_s in lead["age_s"].items()],
    }


def bucketed(staleness: Mapping[int, int]) -> dict[str, int]:
    """A histogram by bucket: {"0": pushes that missed nothing, ..., "128": those that missed more than 64}."""
    counts = dict.fromkeys(map(str, STALENESS_BUCKETS), 0)
    for missed, count in staleness.items():
        bucket = next((end for end in STALENESS_BUCKETS if missed <= end), STALENESS_BUCKETS[-1])
        counts[str(bucket)] += count
    return counts


def quantile(staleness: Mapping[int, int], share: float) -> int:
    """The smallest staleness that at least `share` of the pushes do not exceed; 0 without pushes."""
    rest = share * sum(staleness.values())
    for missed in sorted(staleness):
        rest -= staleness[missed]
        if staleness[missed] and rest <= 1e-9:
            return missed
    return 0


def _if_before(before: Numbers | None, now: Numbers) -> Numbers:
    """Earlier numbers, or none when the server was restarted between."""
    return before if before is not None and before["in_bytes"] <= now["in_bytes"] and before["time_s"] < now["time_s"] else {}
