"""The benchmarks run to their end, and what they measure hangs together. Their figures are not judged: machines differ."""

from __future__ import annotations

import subprocess
import sys

import pytest


def bench(*arguments: str) -> str:
    """What a `raytrain bench` command prints; it starts a Ray of its own."""
    command = [sys.executable, "-m", "raytrain_app", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_step(workers: str) -> None:
    lines = bench("step", "--model", "linear", "--workers", workers, "--steps", "5", "--rounds", "2").splitlines()
    assert lines[0].startswith("linear, global batch 64, ")
    assert [line.split("  ")[1] for line in lines[1:6]] == ["plain", "engine", "exact", "exact, audit", "fast"]
    assert lines[1].endswith("1.000 of plain")
    assert all(part in lines[6] for part in ("data", "forward and backward", "conversion and sum", "update"))
    assert lines[7].startswith("  control: ")


@pytest.mark.slow
def test_start() -> None:
    product, stock, ratio = bench("start", "--repeats", "1", "--workers", "1").splitlines()
    assert product.startswith("raytrain run")
    assert all(what in product for what in ("start", "join", "first step"))
    assert stock.startswith("stock Ray Train")
    assert ratio.startswith("to the first step: ")


@pytest.mark.slow
def test_checkpoint() -> None:
    lines = bench("checkpoint", "--checkpoints", "2", "--workers", "1").splitlines()
    assert lines[0].startswith("a checkpoint holds training for ")
    assert [line.split("  ")[0] for line in lines[1:]] == ["raytrain", "stock Ray Train"]
