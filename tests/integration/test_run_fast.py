"""`train.reduction: fast`: DistributedDataParallel, which is right to rounding and has its own ways to fail."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_app.job import Job, job_from_dict
from raytrain_app.state import Arrays
from tests.integration.replicas import Outcome, Replicas


def make_job(task: str = "mnist", model: dict[str, Any] | None = None, **train: Any) -> Job:
    return job_from_dict(
        {
            "name": "fast",
            "task": task,
            "model": model or {"name": "linear"},
            "train": {"epochs": 2, "global_batch_size": 64, "virtual_shards": 4, "reduction": "fast", **train},
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        }
    )


def weights(job: Job, outcome: Outcome) -> Arrays:
    found = outcome.checkpoints(job).load()
    assert found is not None
    return found[0].weights


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mnist", "tests.integration.given_tasks:UNUSED"], ids=["linear", "unused-parameter"])
def test_fast_reduction_trains_as_well(task: str, replicas: Replicas) -> None:
    model = {"name": "linear" if task == "mnist" else "net"}
    job, exact = make_job(task, model), make_job(task, model, reduction="exact")
    rows = replicas.load(job)
    alone, two, right = (replicas.run(*run, rows) for run in ((job, 1), (job, 2), (exact, 1)))
    for outcome in (alone, two):
        assert outcome.summary["status"] == "finished"
        assert outcome.summary["test_accuracy"] > 0.86
        assert outcome.summary["test_accuracy"] == pytest.approx(right.summary["test_accuracy"], abs=0.01)
    steps = [outcome.metrics[20]["loss"] for outcome in (alone, two, right)]
    assert steps == pytest.approx([steps[0]] * 3, rel=1e-3)


@pytest.mark.slow
def test_a_checkpoint_of_four_workers_goes_on_with_one_and_back(replicas: Replicas) -> None:
    def job(epochs: int, reduction: str = "fast") -> Job:
        model = {"name": "cnn", "channels": 4, "hidden": 16, "batch_norm": True}
        return make_job(model=model, epochs=epochs, reduction=reduction)

    rows = replicas.load(job(1), 386, 57, 57)  # six batches of 64, and one of two rows, fewer than there are workers
    first, right = replicas.run(job(1), 4, rows), replicas.run(job(1, "exact"), 4, rows)
    assert [record["loss"] for record in first.metrics[:7]] == pytest.approx([r["loss"] for r in right.metrics[:7]], rel=1e-3)
    names = sorted(weights(job(1), first))
    assert names[:2] == ["0.bias", "0.weight"]
    assert not any("module" in name for name in names)
    second, third = replicas.run(job(2), 1, rows, first.directory), replicas.run(job(3), 4, rows, first.directory)
    assert [outcome.summary["steps"] for outcome in (first, second, third)] == [7, 14, 21]
    assert [outcome.events[-1]["step"] for outcome in (second, third)] == [14, 21]
    resumed = [event["step"] for outcome in (second, third) for event in outcome.events if event["kind"] == "resume"]
    assert resumed == [7, 14]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_the_task_is_the_tasks_and_no_lost_peer(workers: int, replicas: Replicas) -> None:
    job = make_job("tests.integration.given_tasks:RAISING", {"name": "mlp"})
    outcome = replicas.run(job, workers, replicas.load(job))
    assert outcome.failure is not None
    assert "mat1 and mat2 shapes cannot be multiplied" in str(outcome.failure)
    assert "in met_mark" in outcome.failure.traceback
    assert len([event for event in outcome.events if event["kind"] == "generation"]) == 1
