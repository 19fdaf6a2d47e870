"""The promise with Keras: the same weights and the same metrics, bit for bit, for any number of workers."""

from __future__ import annotations

import csv
import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from raytrain_app.data import Dataset
from raytrain_app.job import Job, job_from_dict
from tests.integration.replicas import Outcome, Replicas

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; pip install 'raytrain-app[tensorflow]'", allow_module_level=True)

GIVEN = "tests.integration.given_keras:"
WORKERS = (1, 2, 3, 4)
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": 33},
    "cnn": {"name": "cnn", "channels": 4, "hidden": 16},
    "dropout-batchnorm": {"name": "cnn", "channels": 4, "hidden": 16, "dropout": 0.3, "batch_norm": True},
}


def make_job(model: dict[str, Any], **sections: Any) -> Job:
    """Batches of 90 rows, which four shards do not divide."""
    raw = {
        "name": "keras",
        "task": "mnist",
        "framework": "tensorflow",
        "model": model,
        "train": {"epochs": 2, "global_batch_size": 90, "virtual_shards": 4},
        "optimizer": {"name": "adam", "lr": 0.003, "schedule": "cosine", "warmup_steps": 3},
        "checkpoint": {"every_steps": 3},
        "audit": True,
    }
    return job_from_dict({**raw, **sections})


@pytest.fixture(scope="module")
def rows(replicas: Replicas) -> Dataset:
    """362 rows to train on: four batches of 90, and a last one of two rows, fewer than there are shards."""
    return replicas.load(make_job({"name": "linear"}), 362, 101, 57)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_weights_and_metrics_are_the_same_for_any_number_of_workers(model: str, replicas: Replicas, rows: Dataset) -> None:
    job = make_job(MODELS[model])
    alone, *others = [replicas.run(job, workers, rows) for workers in WORKERS]
    assert alone.summary["status"] == "finished"
    assert (alone.summary["steps"], alone.summary["samples"]) == (10, 724)
    for workers, other in zip(WORKERS[1:], others, strict=True):
        assert other.summary == alone.summary
        assert other.comparable == alone.comparable
        assert {record["workers"] for record in other.metrics} == {workers}
        assert other.checkpoint(job).to_bytes() == alone.checkpoint(job).to_bytes()
    steps = [record for record in alone.metrics if record["kind"] == "step"]
    assert sorted(row for record in steps[:5] for row in record["ids"]) == rows.train.ids.tolist()


@pytest.mark.slow
def test_one_run_of_keras_callbacks_for_the_job(replicas: Replicas) -> None:
    """They are called once, whatever the number of workers, with the numbers of metrics.jsonl; and their word counts."""
    job = job_from_dict(
        {
            "name": "keras",
            "task": f"{GIVEN}TELLING",
            "framework": "tensorflow",
            "model": {"name": "mlp", "hidden": 24, "dropout": 0.1},
            "train": {"epochs": 8, "global_batch_size": 128, "virtual_shards": 4},
            "optimizer": {"lr": 0.08},
        }
    )
    data = replicas.load(job)
    alone, several = replicas.run(job, 1, data), replicas.run(job, 3, data)
    assert several.summary == alone.summary
    assert several.comparable == alone.comparable
    for outcome in (alone, several):
        told = [json.loads(line) for line in (outcome.directory / "keras/told.jsonl").read_text().splitlines()]
        epochs = [record for record in outcome.metrics if record["kind"] == "epoch"]
        steps = [record for record in outcome.metrics if record["kind"] == "step"]
        assert [t["number"] for t in told if t["hook"] == "epoch_begin"] == list(range(len(epochs)))
        ended = [t for t in told if t["hook"] == "epoch_end"]
        for name in ("loss", "accuracy", "top2", "val_loss", "val_accuracy", "val_top2"):
            assert [t[name] for t in ended] == [record[name] for record in epochs]
        assert [(t["loss"], t["accuracy"]) for t in told if t["hook"] == "batch_end"] == [
            (s["loss"], s["accuracy"]) for s in steps
        ]
        with (outcome.directory / "keras/log.csv").open() as file:
            assert [float(line["val_loss"]) for line in csv.DictReader(file)] == [record["val_loss"] for record in epochs]
        assert [step["lr"] for step in steps] == pytest.approx([0.08 * 0.5 ** (step["epoch"] - 1) for step in steps])
        _assert_stopped_at_the_best(outcome, epochs)


def _assert_stopped_at_the_best(outcome: Outcome, epochs: list[dict[str, Any]]) -> None:
    losses = [record["val_loss"] for record in epochs]
    assert outcome.summary["status"] == "early_stopped"
    assert losses[-1] >= min(losses) == losses[-2]
    saved = sorted(path.name for path in (outcome.directory / "keras").glob("*.keras"))
    assert saved == [f"epoch-{number}.keras" for number in range(1, len(epochs) + 1)]
    checkpoints = outcome.directory / "checkpoints"
    best = (checkpoints / "best").read_text().strip()
    manifest = json.loads((checkpoints / best / "manifest.json").read_text())
    assert outcome.summary["weights_sha256"] == manifest["weights_sha256"]  # restored at the end


def test_torch_and_keras_read_the_same_batches(replicas: Replicas, rows: Dataset, tmp_path: Path) -> None:
    for framework in ("torch", "tensorflow"):
        model = {"name": "linear", "folder": str(tmp_path)}
        replicas.run(make_job(model, task=f"{GIVEN}SPYING", framework=framework), 1, rows)
    ours, theirs = ((tmp_path / name).read_text().splitlines() for name in ("torch", "tensorflow"))
    assert ours == theirs
    assert len(ours) == len(set(ours)) == 2 * (4 * 4 + 1)  # the two rows of an epoch's last batch are one shard


@pytest.mark.slow
def test_digits_are_learnt(replicas: Replicas) -> None:
    """The whole embedded set, with the job of the example."""
    job = job_from_dict(
        {
            "name": "keras",
            "task": "mnist",
            "framework": "tensorflow",
            "model": {"name": "cnn"},
            "train": {"epochs": 3, "global_batch_size": 64, "virtual_shards": 4},
            "optimizer": {"name": "adam", "lr": 0.002},
            "checkpoint": {"monitor": "val_accuracy"},
        }
    )
    outcome = replicas.run(job, 2, replicas.load(job))
    assert outcome.summary["test_accuracy"] >= 0.95
    best = outcome.directory / "checkpoints" / (outcome.directory / "checkpoints/best").read_text().strip()
    assert zipfile.is_zipfile(best / "model.keras")


@pytest.mark.slow
def test_fashion_mnist_in_full(replicas: Replicas, fashion_mnist: Path) -> None:
    job = job_from_dict(
        {
            "name": "keras",
            "task": "mnist",
            "framework": "tensorflow",
            "model": {"name": "cnn"},
            "data": {"source": str(fashion_mnist)},
            "train": {"epochs": 3, "global_batch_size": 128, "virtual_shards": 2},
            "optimizer": {"name": "adam", "lr": 0.002, "schedule": "cosine", "warmup_steps": 50},
        }
    )
    assert replicas.run(job, 2, replicas.load(job)).summary["test_accuracy"] >= 0.89
