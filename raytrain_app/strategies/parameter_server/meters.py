"""The servers' numbers at Ray's Prometheus endpoint, beside Ray's own."""

from __future__ import annotations

import time

from ray.util.metrics import Counter, Gauge, Histogram

from raytrain_app.strategies.parameter_server.stats import STALENESS_BUCKETS, Stats

EVERY_S = 1.0


class Meters:
    """Carries a server's counts over to Ray's metrics every second; Ray names them `ray_raytrain_server_...`.

    Args:
        run: name of the run, a tag of all of them.
        server: its number, another tag.
    """

    def __init__(self, run: str, server: int) -> None:
        tags = {"run": run, "server": str(server)}
        self._counters = {
            name: Counter(f"raytrain_server_{name}_total", text, tuple(tags))
            for name, text in (
                ("pushes", "Gradients applied."),
                ("duplicates", "Gradients that had been applied before, and were not again."),
                ("refused", "Gradients that were too old."),
                ("in_bytes", "Bytes of gradients taken in."),
                ("out_bytes", "Bytes of parameters given out."),
                ("waited", "Requests for a lease that had to wait."),
                ("waited_s", "Seconds that requests for a lease waited."),
            )
        }
        self._gap = Gauge("raytrain_server_gap", "Root mean square distance that parameters moved under a gradient.", tuple(tags))
        self._age = Gauge("raytrain_server_worker_age_s", "Seconds since a worker last pushed.", (*tags, "worker"))
        self._staleness = Histogram(
            "raytrain_server_staleness",
            "Updates that an applied gradient missed.",
            boundaries=[end + 0.5 for end in STALENESS_BUCKETS],
            tag_keys=tuple(tags),
        )
        for meter in (*self._counters.values(), self._gap, self._age, self._staleness):
            meter.set_default_tags(tags)
        self._told = Stats()
        self._told_s = 0.0

    def update(self, stats: Stats) -> None:
        """Adds what is new since the last call; does nothing if that was just now."""
        now_s = time.monotonic()
        if now_s - self._told_s < EVERY_S:
            return
        self._told_s = now_s
        for name, counter in self._counters.items():
            grown = getattr(stats, name) - getattr(self._told, name)
            if grown > 0:
                counter.inc(grown)
            setattr(self._told, name, getattr(stats, name))
        for missed, count in dict(stats.staleness).items():
            for _ in range(count - self._told.staleness[missed]):
                self._staleness.observe(missed)
            self._told.staleness[missed] = count
        self._gap.set(stats.gap)
        for worker, seen_s in dict(stats.seen_s).items():
            self._age.set(now_s - seen_s, {"worker": worker})
