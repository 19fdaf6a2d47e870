"""How workers are started and talk, one file a strategy."""

from __future__ import annotations

from collections.abc import Callable

from raytrain_app.job import Job
from raytrain_app.strategies.worker import WorkerSpec


def train_body(job: Job) -> Callable[[WorkerSpec], None]:
    """What each worker of the job's pools runs."""
    return _allreduce


def _allreduce(spec: WorkerSpec) -> None:
    from raytrain_app.strategies.allreduce import train
    from raytrain_app.strategies.worker import run_worker

    run_worker(spec, train)
