"""Runs that fail: what went wrong is said, in seconds, and nothing that is broken is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain_app import runner
from raytrain_app.errors import TrainingError
from raytrain_app.job import Job, job_from_dict
from raytrain_app.storage.rundir import RunDirectory
from tests.integration.replicas import Replicas

TASKS = "tests.integration.given_tasks:"


def make_job(task: str, storage: Path | None = None, **sections: Any) -> Job:
    raw = {
        "name": "failing",
        "task": task,
        "model": {"name": "mlp"},
        "train": {"epochs": 3, "global_batch_size": 50, "virtual_shards": 4},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "checkpoint": {"every_steps": 1, "keep": 100},
        "storage": str(storage or "runs"),
    }
    return job_from_dict({**raw, **sections})


def test_a_loss_that_explodes_ends_the_run(tmp_path: Path, ray_local: None) -> None:
    job = make_job("synthetic", tmp_path, optimizer={"name": "sgd", "lr": 1e6}, scaling={"workers": 2})
    with pytest.raises(TrainingError, match=r"(loss|gradient) is not finite at step (\d+)") as caught:
        runner.run(job)
    assert caught.value.exit_code == 4
    assert caught.value.traceback == ""
    directory = RunDirectory.open(str(tmp_path / "failing"))
    result = directory.read_result()
    assert result is not None
    assert result["status"] == "failed"
    assert result["error"] == str(caught.value)
    last = directory.read_metrics()[-1]
    assert f"at step {last['step'] + 1} of epoch" in str(caught.value)
    assert np.isfinite(last["loss"])


@pytest.mark.parametrize("workers", [1, 3])
def test_a_nan_on_one_worker_is_in_nobodys_weights_and_no_checkpoint(workers: int, replicas: Replicas) -> None:
    job = make_job(f"{TASKS}NOT_A_NUMBER")
    outcome = replicas.run(job, workers, replicas.load(job))
    assert outcome.failure is not None
    failed = outcome.metrics[-1]["step"] + 1
    assert f"the loss is not finite at step {failed} of epoch 1" in str(outcome.failure)
    store = outcome.checkpoints(job)
    assert store.steps() == list(range(1, failed))
    for which in ("latest", "best"):
        found = store.load(which)
        assert found is not None or which == "best"
        if found is not None:
            assert all(np.isfinite(array).all() for array in found[0].weights.values())


def test_weights_that_overflow_in_the_last_step_are_no_result(replicas: Replicas) -> None:
    job = make_job(
        "synthetic",
        train={"epochs": 1, "global_batch_size": 1000, "virtual_shards": 4},
        optimizer={"name": "sgd", "lr": 3e38, "weight_decay": 100.0},
        data={"validation_fraction": 0},
        checkpoint={"monitor": "loss"},
    )
    outcome = replicas.run(job, 2, replicas.load(job))
    assert outcome.failure is not None
    assert "not finite" in str(outcome.failure)
    assert outcome.checkpoints(job).steps() == []


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_on_one_worker_is_what_is_told(workers: int, replicas: Replicas) -> None:
    job = make_job(f"{TASKS}RAISING")
    outcome = replicas.run(job, workers, replicas.load(job))
    assert outcome.failure is not None
    assert str(outcome.failure) == "RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    assert 'given_tasks.py", line' in outcome.failure.traceback
    assert len([event for event in outcome.events if event["kind"] == "generation"]) == 1


def test_a_task_that_exits_ends_the_run(replicas: Replicas) -> None:
    job = make_job(f"{TASKS}EXITING")
    outcome = replicas.run(job, 2, replicas.load(job))
    assert outcome.failure is not None
    assert str(outcome.failure) == "SystemExit: no more"
    assert "in met_mark" in outcome.failure.traceback
