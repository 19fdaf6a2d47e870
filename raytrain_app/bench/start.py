"""From the command to the first step: the product and stock Ray Train on the same job, one after the other in one run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from raytrain_app import data

WAIT_S = 240.0
BATCH = 64
Times = dict[str, float]


@dataclass
class Figures:
    """Seconds from the command to what happened, one entry a repeat.

    Attributes:
        product: with "start" (the run is on record), "join" (all workers are ready) and "first step".
        stock: with "first step".
    """

    product: list[Times] = field(default_factory=list)
    stock: list[Times] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        lines = []
        for kind, found in {"raytrain run": self.product, "stock Ray Train": self.stock}.items():
            if found:
                parts = ", ".join(f"{what} {statistics.median(times[what] for times in found):.1f} s" for what in found[0])
                lines.append(f"{kind:<16} {parts}   (medians of {len(found)})")
        if self.stock:
            ours, theirs = (statistics.median(t["first step"] for t in found) for found in (self.product, self.stock))
            lines.append(f"to the first step: {ours / theirs:.2f} of stock Ray Train's time")
        return lines


def measure_start(repeats: int, workers: int, address: str | None, stock: bool, tell: Callable[[str], None]) -> Figures:
    """Starts both programs anew each time, with nothing running before, or on the cluster at `address`.

    Args:
        repeats: how often.
        workers: of the job.
        address: of a running Ray cluster on this machine; None is a start from nothing.
        stock: measure stock Ray Train too.
        tell: told of progress.
    """
    figures = Figures()
    for number in range(repeats):
        tell(f"start {number + 1} of {repeats}")
        with tempfile.TemporaryDirectory() as folder:
            figures.product.append(_product(Path(folder), workers, address))
        if stock:
            with tempfile.TemporaryDirectory() as folder:
                figures.stock.append(_stock(Path(folder), workers, address))
    return figures


def _product(folder: Path, workers: int, address: str | None) -> Times:
    job = {
        "name": "bench-start",
        "task": "mnist",
        "model": {"name": "cnn"},
        "data": {"source": "mnist-sample"},
        "train": {"epochs": 1000, "global_batch_size": BATCH},
        "scaling": {"workers": workers},
        "storage": str(folder),
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "raytrain_app", "run", str(folder / "job.yaml"), "--quiet"]
    metrics, events = folder / "bench-start" / "metrics.jsonl", folder / "bench-start" / "events.jsonl"
    began_s = time.time()
    process = subprocess.Popen(command, env=_environment(address), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until(process, lambda: metrics.exists() and "\n" in metrics.read_text())
    finally:
        process.terminate()
        process.wait()
    happened = [json.loads(line) for line in events.read_text().splitlines()]
    first = json.loads(metrics.read_text().splitlines()[0])["time"]
    times = {kind: max(event["time"] for event in happened if event["kind"] == kind) for kind in ("start", "join")}
    return {kind: time_s - began_s for kind, time_s in {**times, "first step": first}.items()}


def _stock(folder: Path, workers: int, address: str | None) -> Times:
    sample = Path(data.__file__).parent / "embedded" / "mnist-10k.parquet"
    command = [sys.executable, "-m", "raytrain_app.bench.stock_start", str(sample), str(workers), str(BATCH), str(folder)]
    result = folder / "first"
    began_s = time.time()
    process = subprocess.Popen(command, env=_environment(address), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until(process, result.exists)
        time_s = float(result.read_text()) - began_s
        process.wait(WAIT_S)
        return {"first step": time_s}
    finally:
        process.terminate()
        process.wait()


def _environment(address: str | None) -> dict[str, str]:
    return os.environ | ({} if address is None else {"RAY_ADDRESS": address})


def _until(process: subprocess.Popen[Any], condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise TimeoutError(f"no first step within {WAIT_S:g} s, or the program ended with {process.returncode}")
        time.sleep(0.05)
