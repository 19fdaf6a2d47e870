"""Whole runs through the runner: what it leaves behind, and the accuracies that real data must reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_app import runner
from raytrain_app.job import job_from_dict, load_job
from raytrain_app.report.updates import Update
from raytrain_app.storage.rundir import RunDirectory

EXAMPLES = Path(__file__).parents[2] / "examples"
RESULT = {
    *("status", "error", "framework", "strategy", "epochs", "steps", "samples", "train_loss", "val_loss", "val_accuracy"),
    *("test_loss", "test_accuracy", "weights_sha256", "workers", "disruptions", "steps_redone", "pause_s", "goodput"),
    *("wall_s", "samples_per_s", "tokens_per_s", "model_flops_utilization", "checkpoint", "computes_on"),
}


def test_a_run_leaves_a_complete_directory(tmp_path: Path, ray_local: None) -> None:
    """With the settings that need processes of their own: a capped instruction set and bfloat16."""
    job = job_from_dict(
        {
            "name": "whole",
            "task": "synthetic",
            "model": {"name": "mlp", "dropout": 0.1, "batch_norm": True},
            "train": {
                "epochs": 6,
                "global_batch_size": 50,
                "virtual_shards": 3,
                "portable": True,
                "precision": "bf16",
                "early_stopping": {"monitor": "val_accuracy", "min_delta": 0.9, "patience": 2},
            },
            "optimizer": {"name": "adam", "lr": 0.01, "schedule": "linear", "warmup_steps": 10},
            "scaling": {"workers": 2},
            "storage": str(tmp_path),
        }
    )
    updates: list[Update] = []
    result = runner.run(job, on_update=updates.append)
    directory = RunDirectory.open(result.directory)
    record = directory.read_result()
    assert record == result.record
    assert record.keys() >= RESULT
    assert (record["status"], record["error"], record["epochs"], record["steps"]) == ("early_stopped", None, 3, 54)
    assert record["test_accuracy"] > 0.7
    assert [count for _, count in record["workers"]] == [2]
    assert {kind["capability"] for kind in record["computes_on"]} == {"DEFAULT"}
    assert 0 < record["goodput"] <= 1
    assert record["disruptions"] == []

    metrics = directory.read_metrics()
    assert [line["step"] for line in metrics if line["kind"] == "step"] == list(range(1, 55))
    assert [line["epoch"] for line in metrics if line["kind"] == "epoch"] == [1, 2, 3]
    assert [update.record["step"] for update in updates if update.kind == "step"] == list(range(1, 55))
    assert {update.record["total_steps"] for update in updates if update.kind == "step"} == {108}
    kinds = [event["kind"] for event in directory.read_events()]
    assert kinds[0] == "start"
    assert kinds[-1] == "finish"
    assert {"join", "generation", "checkpoint"} <= set(kinds)
    assert directory.read_job() == job
    assert list((tmp_path / "whole" / "tensorboard").iterdir())
    best = min((line for line in metrics if line["kind"] == "epoch"), key=lambda line: float(line["val_loss"]))
    assert record["checkpoint"] == str(tmp_path / "whole" / "checkpoints" / f"step-{best['step']:08d}")


@pytest.mark.slow
def test_the_demo_has_the_same_hash_for_any_number_of_workers(tmp_path: Path, ray_local: None) -> None:
    records = []
    for workers in (1, 2, 3, 4):
        overrides = [f"scaling.workers={workers}", f"storage={tmp_path}"]
        job = load_job(str(EXAMPLES / "mnist_torch.yaml"), overrides, f"with-{workers}")
        records.append(runner.run(job).record)
    for key in ("weights_sha256", "train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy", "steps", "samples"):
        assert len({record[key] for record in records}) == 1, key
    assert records[0]["test_accuracy"] >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("model", "accuracy"), [("linear", 0.83), ("cnn", 0.89)])
def test_fashion_mnist_in_full(model: str, accuracy: float, tmp_path: Path, ray_local: None, fashion_mnist: Path) -> None:
    overrides = [f"model.name={model}", f"data.source={fashion_mnist}", f"storage={tmp_path}", "scaling.workers=2"]
    job = load_job(str(EXAMPLES / "fashion_mnist.yaml"), overrides)
    assert job.train.epochs <= 3
    record = runner.run(job).record
    assert record["samples"] == 54_000 * job.train.epochs
    assert record["test_accuracy"] >= accuracy
