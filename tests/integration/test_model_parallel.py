"""Replicas in parts: the loss of a whole model, and the same weights, bit for bit, for any number of replicas of one cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_app.data import Dataset
from raytrain_app.job import Job, job_from_dict
from raytrain_app.learners.torch import TorchLearner
from raytrain_app.state import weights_sha256
from raytrain_app.tasks.tiny_gpt import TASK
from tests.integration.replicas import Outcome, Replicas

CUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "microbatches": 3},
    "gpipe": {"pipeline": 2, "microbatches": 2, "schedule": "gpipe", "activation_checkpointing": True},
    "interleaved": {"pipeline": 2, "microbatches": 4, "schedule": "interleaved", "stages_per_worker": 2},
    "fsdp-tensor": {"fsdp": 2, "tensor": 2},
}


def make_job(strategy: dict[str, Any], workers: int, **train: Any) -> Job:
    """Batches of 15 rows in three shards, of five rows each, which two workers do not divide."""
    return job_from_dict(
        {
            "name": "parts",
            "task": "tiny_gpt",
            "model": {"name": "gpt", "layers": 2, "width": 32},
            "train": {"epochs": 3, "global_batch_size": 15, "virtual_shards": 3, "clip_norm": 1.0, **train},
            "optimizer": {"name": "adamw", "lr": 0.003},
            "strategy": strategy,
            "scaling": {"workers": workers},
            "checkpoint": {"every_steps": 20},
            "audit": True,
        }
    )


@pytest.fixture(scope="module")
def rows(replicas: Replicas) -> Dataset:
    """252 rows to train on: 16 batches of 15 and one of 12."""
    return replicas.load(make_job({"name": "allreduce"}, 1), 252, 61, 37)


@pytest.fixture(scope="module")
def whole(replicas: Replicas, rows: Dataset) -> Outcome:
    """The run of one process with the whole model: 51 steps."""
    outcome = replicas.run(make_job({"name": "allreduce"}, 1), 1, rows)
    assert outcome.summary["steps"] == 51
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_model_has_the_losses_of_the_whole_one(cut: str, replicas: Replicas, rows: Dataset, whole: Outcome) -> None:
    strategy = {"name": "model_parallel", **CUTS[cut]}
    peers = make_job(strategy, 4).replica_workers
    job = make_job(strategy, peers)
    one = replicas.run(job, peers, rows)
    assert one.failure is None
    for mine, expected in zip(one.metrics, whole.metrics, strict=True):
        assert mine.keys() == expected.keys()
        for name in expected.keys() & {"loss", "val_loss", "accuracy", "val_accuracy"}:
            assert mine[name] == pytest.approx(expected[name], rel=1e-5)
        assert mine.get("ids") == expected.get("ids")
    _assert_checkpoint_is_whole(job, one)
    for count in (2, 3) if peers == 2 else (2,):
        more = replicas.run(make_job(strategy, count * peers), count * peers, rows)
        assert more.failure is None
        assert more.summary == one.summary
        assert more.comparable == one.comparable


@pytest.mark.slow
def test_a_run_goes_on_with_any_other_cut(replicas: Replicas, rows: Dataset, whole: Outcome) -> None:
    """An epoch each on workers that are cut in another way; the checkpoints between them are joined and cut again."""
    cuts = [CUTS["fsdp-tensor"], CUTS["pipeline"], CUTS["fsdp"]]
    directory: Path | None = None
    metrics: list[dict[str, Any]] = []
    for epochs, cut in enumerate(cuts, start=1):
        strategy = {"name": "model_parallel", **cut}
        peers = make_job(strategy, 4).replica_workers
        outcome = replicas.run(make_job(strategy, peers, epochs=epochs), peers, rows, directory)
        directory, metrics = outcome.directory, metrics + outcome.metrics
        resumed = [(event["source"], event["step"]) for event in outcome.events if event["kind"] == "resume"]
        assert resumed == ([("checkpoint", 17 * (epochs - 1))] if epochs > 1 else [])
    assert len(metrics) == len(whole.metrics)
    for mine, expected in zip(metrics, whole.metrics, strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def _assert_checkpoint_is_whole(job: Job, outcome: Outcome) -> None:
    """The newest checkpoint is one of the whole model, with the weights of the run's end."""
    found = outcome.checkpoints(job).load("latest")
    assert found is not None
    assert weights_sha256(found[0].weights) == outcome.summary["weights_sha256"]
    learner = TorchLearner(make_job({"name": "allreduce"}, 1), TASK, torch.device("cpu"))
    learner.load(found[0])
    assert weights_sha256(learner.weights()) == outcome.summary["weights_sha256"]
