"""The line about the servers: differences of counts, and a restart in between."""

from __future__ import annotations

from typing import Any

from raytrain_app.strategies.parameter_server.stats import Stats, bucketed, quantile, report


def numbers(**values: Any) -> dict[str, Any]:
    stats = Stats()
    for name, value in values.items():
        if name != "time_s":
            setattr(stats, name, value)
    return {**stats.read(), "time_s": values["time_s"]}


def test_rates_are_differences_over_time() -> None:
    before = {0: numbers(time_s=10.0, pushes=5, in_bytes=100, staleness={0: 5}), 1: numbers(time_s=10.0, in_bytes=100)}
    now = {
        0: numbers(time_s=12.0, pushes=9, in_bytes=300, staleness={0: 6, 3: 3}, gap=0.5),
        1: numbers(time_s=12.0, in_bytes=500),
    }
    line = report(before, now)
    assert (line["servers"], line["rounds_per_s"], line["in_bytes_per_s"]) == (2, 2.0, 300)
    assert line["staleness_counts"]["0"] == 1
    assert line["staleness_counts"]["4"] == 3
    assert (line["staleness_median"], line["staleness_max"], line["gap"]) == (3, 3, 0.5)


def test_a_restarted_server_counts_from_zero() -> None:
    before = {0: numbers(time_s=10.0, pushes=50, in_bytes=1000, staleness={0: 50})}
    line = report(before, {0: numbers(time_s=3.0, pushes=4, in_bytes=80, staleness={1: 4})})
    assert (line["rounds_per_s"], line["in_bytes_per_s"], line["staleness_counts"]["1"]) == (4.0, 80, 4)


def test_histogram_and_quantiles() -> None:
    counts = {0: 1, 1: 1, 2: 1, 9: 1, 1000: 1}
    assert {end: count for end, count in bucketed(counts).items() if count} == {"0": 1, "1": 1, "2": 1, "16": 1, "128": 1}
    assert [quantile(counts, share) for share in (0.2, 0.5, 0.8, 1.0)] == [0, 2, 9, 1000]
    assert quantile({}, 0.5) == 0
