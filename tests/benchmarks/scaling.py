"""How long a step takes with up to 1,024 workers: a model on paper, its constants fitted to what was measured on one machine.

    python -m tests.benchmarks.scaling            draws what is in measured.json
    python -m tests.benchmarks.scaling --measure  measures anew first

A step is forward and backward of the worker's rows, the exchange, the sum, and the update. The exact step exchanges in two
rounds of all-to-all messages: partial sums go to the worker that owns the slice, and means come back. How many bytes that
are follows from the engine's own plan, the tree of shards: a worker whose shards are one subtree sends one sum. The sums of
long vectors are hidden behind the backward pass of the last shard as far as that is long enough. The fast step is a ring
all-reduce of float32 gradients, hidden behind the whole backward pass.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from raytrain_app.bench.step import SIZES, WARM_UP, Script, Setting
from raytrain_app.elastic.plan import cover, owned_shards
from raytrain_app.elastic.segments import count_segments

MEASURED = Path(__file__).parent / "measured.json"
PICTURE = Path(__file__).parents[2] / "examples" / "pictures" / "scaling.png"
WORKERS = tuple(2**n for n in range(11))
BACKWARD_SHARE = 2 / 3
"""Part of forward and backward behind which an exchange can hide."""


@dataclass(frozen=True)
class Measurement:
    """Medians of `raytrain_app.bench.engine` with two workers, in seconds a step."""

    parameters: int
    exchange_s: float
    sum_s: float
    update_s: float


@dataclass(frozen=True)
class Costs:
    """Constants of a machine and its network.

    Attributes:
        message_s: of one round between two workers, whatever its size.
        bytes_per_s: that a worker sends while it receives as many.
        sum_s: conversion and sum, per parameter and summed vector.
        update_s: of the optimizer, per parameter.
    """

    message_s: float
    bytes_per_s: float
    sum_s: float
    update_s: float


def exact_bytes(parameters: int, workers: int, shards: int) -> float:
    """Bytes that the busiest worker receives from others in an exact step of float32 gradients."""
    covers = [cover(owned_shards(rank, workers, shards), (0, shards)) for rank in range(workers)]
    leaves = all(high - low == 1 for nodes in covers for low, high in nodes)
    counts = [len(nodes) for nodes in covers]
    sums = (sum(counts) - min(counts)) * (4 if leaves else 8) * parameters / workers
    return sums + 4 * parameters * (workers - 1) / workers


def exact_s(costs: Costs, parameters: int, compute_s: float, workers: int, shards: int) -> float:
    """Seconds of an exact step; `compute_s` is one worker's time for forward and backward of the whole global batch."""
    nodes = sum(len(cover(owned_shards(rank, workers, shards), (0, shards))) for rank in range(workers))
    summed = costs.sum_s * parameters * (nodes / workers + shards / workers - 1)  # slices of all, and own shards before
    means_bytes, messages_s = 4 * parameters * (workers - 1) / workers, (workers - 1) * costs.message_s
    sums_s = messages_s + (exact_bytes(parameters, workers, shards) - means_bytes) / costs.bytes_per_s
    hidden_s = BACKWARD_SHARE * compute_s / shards if count_segments(4 * parameters, workers) > 1 else 0.0
    exchange = max(0.0, sums_s - hidden_s) + messages_s + means_bytes / costs.bytes_per_s
    return compute_s / workers + exchange + summed + costs.update_s * parameters


def fast_s(costs: Costs, parameters: int, compute_s: float, workers: int) -> float:
    """Seconds of a fast step: 2 (W - 1) messages of 1/W of the gradient each (Patarasuk and Yuan, 2009)."""
    share = (workers - 1) / workers
    ring = 2 * (workers - 1) * costs.message_s + 2 * 4 * parameters * share / costs.bytes_per_s
    return compute_s / workers + max(0.0, ring - BACKWARD_SHARE * compute_s / workers) + costs.update_s * parameters


def fit(measurements: Sequence[Measurement]) -> Costs:
    """The constants, by least squares of relative errors: each part is a line in the number of parameters."""
    parameters = np.array([m.parameters for m in measurements], float)

    def line(seconds: Sequence[float]) -> tuple[float, float]:
        found = np.asarray(seconds)
        slope, start = np.polyfit(parameters, found, 1, w=1 / found)
        return max(float(slope), 1e-15), max(float(start), 0.0)

    exchange_slope, exchange_start = line([m.exchange_s for m in measurements])
    # Two workers, one shard each: half a vector arrives in either round, 4 bytes a parameter in all.
    return Costs(
        message_s=exchange_start / 2,
        bytes_per_s=exact_bytes(1, 2, 2) / exchange_slope,
        sum_s=line([m.sum_s for m in measurements])[0],
        update_s=line([m.update_s for m in measurements])[0],
    )


def measure(steps: int = 10, rounds: int = 7) -> list[Measurement]:
    """Measures the parts of the exact step for models of all sizes, on this machine."""
    found = []
    for model, options in SIZES:
        setting = Setting("torch", model, options, steps=steps, rounds=rounds)
        with tempfile.TemporaryDirectory() as storage:
            job = setting.job(storage).model_dump(mode="json")
            engine = Script("raytrain_app.bench.engine", 2, {"job": job, "device": "cpu", "overlap": False})
            try:
                engine.take(WARM_UP)
                parts = [engine.take(steps) for _ in range(rounds)]
            finally:
                engine.close()
        medians = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
        parameters = 7_850 if model == "linear" else 795 * int(options.get("hidden", 128)) + 10
        found.append(Measurement(parameters, medians["exchange"], medians["conversion and sum"], medians["update"]))
    return found


def draw(costs: Costs, path: Path) -> None:
    """Plots the exact step against the fast one, for three models whose batch takes one worker a second and more."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for parameters, compute_s in ((100_000, 1.0), (10_000_000, 10.0), (100_000_000, 100.0)):
        exact = [exact_s(costs, parameters, compute_s, workers, workers) for workers in WORKERS]
        fixed = [exact_s(costs, parameters, compute_s, workers, WORKERS[-1]) for workers in WORKERS]
        fast = [fast_s(costs, parameters, compute_s, workers) for workers in WORKERS]
        name = f"{parameters:,} parameters"
        (curve,) = left.loglog(WORKERS, exact, base=2, label=name)
        left.loglog(WORKERS, fast, base=2, linestyle=":", color=curve.get_color())
        right.semilogx(WORKERS, np.divide(exact, fast), base=2, color=curve.get_color(), label=name)
        right.semilogx(WORKERS, np.divide(fixed, fast), base=2, color=curve.get_color(), linestyle="--")
    left.set(title="seconds a step: exact, and fast (dotted)", xlabel="workers")
    right.set(title="exact over fast (dashed: 1,024 shards)", xlabel="workers", ylim=(0.9, None))
    left.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=110)


def report(costs: Costs, measurements: Sequence[Measurement]) -> list[str]:
    """What the model says, in words."""
    bandwidth, message_us = costs.bytes_per_s / 1e9, costs.message_s * 1e6
    sum_ns, update_ns = costs.sum_s * 1e9, costs.update_s * 1e9
    lines = [f"message {message_us:.0f} us, {bandwidth:.2f} GB/s, sum {sum_ns:.2f} ns and update {update_ns:.2f} ns a parameter"]
    for m in measurements:
        exchange_s = 2 * costs.message_s + exact_bytes(m.parameters, 2, 2) / costs.bytes_per_s
        lines.append(f"{m.parameters:>11,} parameters: exchange {m.exchange_s * 1e3:8.2f} ms, fitted {exchange_s * 1e3:8.2f} ms")
    for parameters, compute_s in ((100_000, 1.0), (10_000_000, 10.0), (100_000_000, 100.0)):
        ratios = {w: exact_s(costs, parameters, compute_s, w, w) / fast_s(costs, parameters, compute_s, w) for w in WORKERS}
        costly = next((f"{w:,} workers" for w, ratio in ratios.items() if ratio > 1.05), "no number of workers up to 1,024")
        worst = max(ratios, key=lambda workers: ratios[workers])
        lines.append(
            f"{parameters:>11,} parameters, {compute_s:g} s of computing a batch: exact costs more than 5 % from {costly} on, "
            f"and {ratios[worst]:.2f} times as much as fast at worst, with {worst:,}"
        )
    return lines


def main(arguments: Sequence[str]) -> None:
    """Measures if asked, fits, draws and reports."""
    if "--measure" in arguments:
        MEASURED.write_text(json.dumps([asdict(measurement) for measurement in measure()], indent=1) + "\n")
    measurements = [Measurement(**values) for values in json.loads(MEASURED.read_text())]
    costs = fit(measurements)
    PICTURE.parent.mkdir(exist_ok=True)
    draw(costs, PICTURE)
    sys.stdout.write("\n".join(report(costs, measurements)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
