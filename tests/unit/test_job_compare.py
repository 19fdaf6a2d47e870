"""What may change between a run and its resumption."""

from __future__ import annotations

import pytest

from raytrain_app.job import job_from_dict, result_differences

BASE = {"name": "a", "task": "mnist", "model": {"name": "cnn"}, "scaling": {"workers": "1..4"}}
OLD = job_from_dict(BASE)


def differences(*overrides: str) -> list[str]:
    return result_differences(OLD, job_from_dict(BASE, overrides))


def test_what_may_change() -> None:
    free = [
        "name=b",
        "storage=s3://bucket/x",
        "scaling={workers: 2, wait_s: 5, resources_per_worker: {CPU: 2}}",
        "train.virtual_shards=4",
        "checkpoint={every_steps: 7, keep: 1, monitor: val_accuracy}",
        "failure={max_restarts: 0, heartbeat_s: 1}",
        "audit=true",
        "tensorboard=false",
        "data.offline=true",
        "data.allow_modified=true",
    ]
    assert differences(*free) == []


def test_recordings_on_a_gpu_may_be_turned_on() -> None:
    gpu = {**BASE, "scaling": {"workers": 4, "resources_per_worker": {"GPU": 1}}}
    assert result_differences(job_from_dict(gpu), job_from_dict(gpu, ["train.cuda_graphs=true"])) == []


def test_a_replica_may_be_cut_in_another_way() -> None:
    base = {**BASE, "scaling": {"workers": 4}, "train": {"virtual_shards": 2}}
    pipeline = {"pipeline": 2, "microbatches": 2, "schedule": "gpipe"}
    cuts: list[dict[str, object]] = [{"fsdp": 2}, {"tensor": 2, "activation_checkpointing": True}, {**pipeline}]
    jobs = [job_from_dict({**base, "strategy": {"name": "model_parallel", **cut}}) for cut in cuts]
    assert all(result_differences(one, other) == [] for one in jobs for other in jobs)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("task=synthetic", 'task: "mnist" before, "synthetic" now'),
        ("model.width=3", "model.width: not set before, 3 now"),
        ("data.order=windowed", 'data.order: "global" before, "windowed" now'),
        ("train.threads=2", "train.threads: 1 before, 2 now"),
        ("train.virtual_shards=8", "train.virtual_shards: 4 before, 8 now"),
        ("scaling.workers=1..5", "train.virtual_shards: 4 before, 5 now"),
        ("scaling.resources_per_worker={GPU: 1}", 'scaling.device: "cpu" before, "cuda" now'),
        ("optimizer.lr=0.5", "optimizer.lr: 0.001 before, 0.5 now"),
        ("train.early_stopping={}", "train.early_stopping: null before, not set now"),
    ],
)
def test_what_may_not_change(override: str, expected: str) -> None:
    assert expected in differences(override)


def test_another_optimizer_names_all_its_keys() -> None:
    found = differences("optimizer={name: sgd, momentum: 0.9}")
    assert 'optimizer.name: "adam" before, "sgd" now' in found
    assert "optimizer.betas: [0.9, 0.999] before, not set now" in found
    assert "optimizer.momentum: not set before, 0.9 now" in found
