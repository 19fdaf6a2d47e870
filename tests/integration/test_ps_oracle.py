"""Exactly once: counters that every push raises by one, under kills of workers and servers and while ranges are cut anew."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.ps_oracle import Oracle


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_kills_while_ranges_are_cut_anew(ray_local: None, tmp_path: Path) -> None:
    with Oracle(tmp_path, servers=1, workers=2, seed=2) as oracle:
        oracle.scale(2)
        oracle.kill("server")
        oracle.wait_until_pushes(20)
        oracle.kill("worker")
        oracle.kill("server")  # together
        oracle.wait_until_pushes(20)
        oracle.scale(1)
        with oracle.stopped("server"):
            started_s = time.monotonic()
            assert len(oracle.status()) == 1
            assert time.monotonic() - started_s < 1.0, "a server that is busy for long keeps nobody from looking"
        oracle.wait_until_pushes(20)
        assert oracle.check() >= 50


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sync", ["async", "bulk"])
def test_ten_kills(ray_local: None, tmp_path: Path, sync: str) -> None:
    victims = ["server", "worker"] * 4 + ["coordinator", "server"] if sync == "async" else ["server", "worker"] * 2
    with Oracle(tmp_path, sync=sync, seed=1) as oracle:
        for number, kind in enumerate(victims):
            oracle.kill(kind)
            if number % 3 != 2:  # else the next one dies at the same time
                oracle.wait_until_pushes(5)
        oracle.wait_until_pushes(100)
        assert oracle.check() >= 100


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [11, 12])
def test_two_hundred_kills(ray_local: None, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Oracle(tmp_path, workers=4, seed=seed) as oracle, ThreadPoolExecutor(1) as aside:
        resharding = aside.submit(oracle.scale, 2)
        while sum(oracle.kills.values()) < 200:
            oracle.kill(rng.choice(["server", "server", "worker", "worker", "worker"]))
            time.sleep(rng.random() * 0.5)
            if rng.random() < 0.4:
                oracle.wait_until_pushes(rng.randrange(1, 50))
            if rng.random() < 0.1 and resharding.done():
                resharding.result()
                resharding = aside.submit(oracle.scale, rng.randrange(1, 4))
        resharding.result()
        oracle.wait_until_pushes(100)
        assert oracle.check() >= 1000
        assert oracle.kills["server"] >= 50
        assert oracle.kills["worker"] >= 50
