"""The promise: the same weights and the same metrics, bit for bit, for any number of workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raytrain_app.data import Dataset, Reader, Split
from raytrain_app.job import Job, job_from_dict
from raytrain_app.tasks.mnist import TASK
from tests.integration.replicas import Outcome, Replicas

WORKERS = (1, 2, 3, 4)
MODELS: dict[str, dict[str, Any]] = {
    "linear": {"name": "linear"},
    "mlp": {"name": "mlp", "hidden": 33},
    "narrow": {"name": "mlp", "hidden": 31},
    "cnn": {"name": "cnn", "channels": 4, "hidden": 16},
    "dropout-batchnorm": {"name": "cnn", "channels": 4, "hidden": 16, "dropout": 0.3, "batch_norm": True},
}


def make_job(model: str, **train: Any) -> Job:
    """Batches of 90 rows, which four shards do not divide."""
    return job_from_dict(
        {
            "name": "equal",
            "task": "mnist",
            "model": MODELS[model],
            "train": {"epochs": 2, "global_batch_size": 90, "virtual_shards": 4, **train},
            "optimizer": {"name": "adam", "lr": 0.003, "schedule": "cosine", "warmup_steps": 3},
            "checkpoint": {"every_steps": 6},
            "audit": True,
        }
    )


@pytest.fixture(scope="module")
def rows(replicas: Replicas) -> Dataset:
    """722 rows to train on: eight batches of 90, and a last one of two rows, fewer than there are shards."""
    return replicas.load(make_job("linear"), 722, 101, 57)


@pytest.mark.parametrize(
    "model", [*(pytest.param(model, marks=pytest.mark.slow) for model in ("linear", "mlp", "cnn")), "dropout-batchnorm"]
)
def test_weights_and_metrics_are_the_same_for_any_number_of_workers(model: str, replicas: Replicas, rows: Dataset) -> None:
    job = make_job(model)
    alone, *others = [replicas.run(job, workers, rows) for workers in WORKERS]
    assert alone.summary["status"] == "finished"
    assert (alone.summary["steps"], alone.summary["samples"]) == (18, 1444)
    for workers, other in zip(WORKERS[1:], others, strict=True):
        assert other.summary == alone.summary
        assert other.comparable == alone.comparable
        assert {record["workers"] for record in other.metrics} == {workers}
        _assert_same_checkpoints(job, alone, other)
    _assert_each_row_once_an_epoch(alone, rows.train)
    _assert_scores_are_those_of_the_model(job, alone, rows)


def test_workers_of_different_shares_exchange_alike(replicas: Replicas, rows: Dataset) -> None:
    """Two of three workers have two sums to send and the third has one, of a length at which that once mattered."""
    job = make_job("narrow", virtual_shards=8)
    alone, three = replicas.run(job, 1, rows), replicas.run(job, 3, rows)
    assert three.summary == alone.summary
    assert three.comparable == alone.comparable


def _assert_same_checkpoints(job: Job, one: Outcome, other: Outcome) -> None:
    """Weights, buffers, optimizer and position are the same."""
    assert one.checkpoints(job).steps() == other.checkpoints(job).steps() == [9, 12, 18]
    for which in ("latest", "best"):
        assert one.checkpoint(job, which).to_bytes() == other.checkpoint(job, which).to_bytes()


def _assert_each_row_once_an_epoch(outcome: Outcome, split: Split) -> None:
    steps = [record for record in outcome.metrics if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 19))
    assert [len(record["ids"]) for record in steps] == 2 * [*8 * [90], 2]
    first, second = ([row for record in steps if record["epoch"] == epoch for row in record["ids"]] for epoch in (1, 2))
    assert sorted(first) == sorted(second) == split.ids.tolist()
    assert first != second


def _assert_scores_are_those_of_the_model(job: Job, outcome: Outcome, dataset: Dataset) -> None:
    """The reported test scores are those of the saved weights over all rows, each counted once, by plain PyTorch."""
    state = outcome.checkpoint(job)
    model = TASK.torch_model(job.model.name, TASK.models[job.model.name](**job.model.options))
    model.load_state_dict({name: torch.from_numpy(array) for name, array in {**state.weights, **state.buffers}.items()})
    model.eval()
    assert dataset.test is not None
    x, y = Reader(dataset.test.blocks).rows(dataset.test.ids)
    with torch.no_grad():
        outputs = model(TASK.torch_inputs(torch.from_numpy(x)))
    labels = torch.from_numpy(y)
    assert outcome.summary["test_accuracy"] == (outputs.argmax(1) == labels).sum().item() / 57
    assert outcome.summary["test_loss"] == pytest.approx(torch.nn.functional.cross_entropy(outputs, labels).item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("train", [{"precision": "bf16"}, {"clip_norm": 0.5, "virtual_shards": 7}], ids=["bf16", "7-shards-clip"])
def test_other_arithmetic_is_equal_too(train: dict[str, Any], replicas: Replicas, rows: Dataset) -> None:
    job = make_job("dropout-batchnorm", **train)
    alone, several = replicas.run(job, 1, rows), replicas.run(job, 3, rows)
    assert several.summary == alone.summary
    assert several.comparable == alone.comparable


@pytest.mark.slow
def test_a_small_last_batch_is_no_trouble_for_batch_normalization(replicas: Replicas) -> None:
    """900 rows in batches of 64 leave four, which four shards of one row could not normalize."""
    job = job_from_dict(
        {
            "name": "equal",
            "task": "synthetic",
            "model": {"name": "mlp", "batch_norm": True, "dropout": 0.2},
            "train": {"epochs": 1, "global_batch_size": 64, "virtual_shards": 4},
        }
    )
    rows = replicas.load(job)
    alone, several = replicas.run(job, 1, rows), replicas.run(job, 4, rows)
    assert (alone.summary["steps"], alone.summary["samples"]) == (15, 900)
    assert several.summary == alone.summary
    assert several.comparable == alone.comparable


@pytest.mark.slow
def test_a_run_stopped_at_the_very_end_of_an_epoch_goes_on_with_the_next(replicas: Replicas, rows: Dataset) -> None:
    def job(epochs: int) -> Job:
        job = make_job("dropout-batchnorm", epochs=epochs)
        return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"schedule": "constant", "warmup_steps": 0})})

    whole, first = replicas.run(job(2), 2, rows), replicas.run(job(1), 1, rows)
    second = replicas.run(job(2), 3, rows, first.directory)
    assert second.summary == whole.summary
    assert first.comparable + second.comparable == whole.comparable


def test_early_stopping_is_decided_once_for_all(replicas: Replicas, rows: Dataset) -> None:
    rule = {"monitor": "val_loss", "patience": 2, "min_delta": 10.0}
    job = make_job("linear", epochs=9, early_stopping=rule)
    alone, several = replicas.run(job, 1, rows), replicas.run(job, 3, rows)
    assert alone.summary["status"] == "early_stopped"
    assert alone.summary["epochs"] == 3
    assert several.summary == alone.summary
    assert several.comparable == alone.comparable


@pytest.mark.parametrize("schedule", [pytest.param("linear", marks=pytest.mark.slow), "cosine"])
def test_the_learning_rate_follows_the_step(schedule: str, replicas: Replicas, rows: Dataset) -> None:
    warmup = 4
    job = job_from_dict(
        {
            "name": "equal",
            "task": "mnist",
            "model": {"name": "linear"},
            "train": {"epochs": 2, "global_batch_size": 90},
            "optimizer": {"name": "sgd", "lr": 0.1, "schedule": schedule, "warmup_steps": warmup},
        }
    )
    rates = [record["lr"] for record in replicas.run(job, 1, rows).metrics if record["kind"] == "step"]
    assert rates[:warmup] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    done = (np.arange(18) - warmup)[warmup:] / (18 - warmup)
    shape = 1 - done if schedule == "linear" else (1 + np.cos(np.pi * done)) / 2
    assert rates[warmup:] == pytest.approx((0.1 * shape).tolist())
