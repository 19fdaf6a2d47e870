"""Worker pools against Ray itself."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ray

from raytrain_app.job import job_from_dict
from raytrain_app.pool import Pool


def test_a_pool_that_is_ended_gives_back_its_room(ray_local: None) -> None:
    """Also on a Ray without a dashboard, which Ray Train's own cleaner would ask."""
    job = job_from_dict({"name": "pool", "task": "synthetic", "model": {"name": "linear"}, "scaling": {"workers": 2}})
    before = free_cpus()
    pool = Pool(0, 2, None, job, time.sleep, 600.0)
    wait_for_cpus(before - 2)
    pool.abort()
    assert pool.ended(30.0)
    assert pool.error is None
    wait_for_cpus(before)


def unpacked(folder: str) -> Path:
    """Leaves a note of which process it was called in."""
    Path(folder, str(os.getpid())).touch()
    return Path(folder)


class Noting:
    """A folder that gets a note of every process which unpacks this."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return unpacked, (self._folder,)


def note(folder: Path) -> None:
    """What the workers do."""
    (folder / f"worker-{os.getpid()}").touch()


def test_what_workers_get_is_unpacked_by_them_alone(ray_local: None, tmp_path: Path) -> None:
    """It may load a framework, for which a pool's controller has no use."""
    job = job_from_dict({"name": "pool", "task": "synthetic", "model": {"name": "linear"}, "scaling": {"workers": 2}})
    pool = Pool(0, 2, None, job, note, Noting(tmp_path))
    assert pool.ended(120.0)
    assert pool.error is None
    names = {path.name for path in tmp_path.iterdir()}
    workers = {name.removeprefix("worker-") for name in names if name.startswith("worker-")}
    assert len(workers) == 2
    assert names == workers | {f"worker-{pid}" for pid in workers}


def wait_for_cpus(wanted: float) -> None:
    deadline_s = time.monotonic() + 60
    while free_cpus() != wanted:
        assert time.monotonic() < deadline_s, f"{free_cpus()} CPUs are free; expected {wanted}"
        time.sleep(0.1)


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))
