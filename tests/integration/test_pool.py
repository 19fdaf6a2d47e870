"""Worker pools against Ray itself."""

from __future__ import annotations

import time

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


def wait_for_cpus(wanted: float) -> None:
    deadline_s = time.monotonic() + 60
    while free_cpus() != wanted:
        assert time.monotonic() < deadline_s, f"{free_cpus()} CPUs are free; expected {wanted}"
        time.sleep(0.1)


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))
