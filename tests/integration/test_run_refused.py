"""Jobs that cannot run are refused with exit code 2 before anything starts, and leave nothing behind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from raytrain_app import runner
from raytrain_app.errors import ClusterError, RaytrainError
from raytrain_app.job import job_from_dict
from raytrain_app.report.updates import Update


def refusal(storage: Path, **sections: Any) -> str:
    """What a run is refused with; fails if anything was started or left."""
    before = sorted(storage.rglob("*")) if storage.is_dir() else []
    updates: list[Update] = []
    raw = {"name": "refused", "task": "synthetic", "model": {"name": "linear"}, "storage": str(storage), **sections}
    with pytest.raises(RaytrainError) as caught:
        runner.run(job_from_dict(raw), on_update=updates.append)
    assert caught.value.exit_code == 2
    assert updates == []
    assert (sorted(storage.rglob("*")) if storage.is_dir() else []) == before
    return str(caught.value)


def test_unknown_task(tmp_path: Path) -> None:
    assert "did you mean mnist?" in refusal(tmp_path, task="mnits")
    assert "module 'no_such_module' was not found" in refusal(tmp_path, task="no_such_module:TASK")
    assert "nothing under the name 'GONE'" in refusal(tmp_path, task="tests.integration.given_tasks:GONE")
    assert "a type under the name 'Marked'" in refusal(tmp_path, task="tests.integration.given_tasks:Marked")


def test_unknown_model_or_option(tmp_path: Path) -> None:
    assert "model.name: found lineal; expected linear, mlp; did you mean linear?" in refusal(tmp_path, model={"name": "lineal"})
    text = refusal(tmp_path, model={"name": "mlp", "hiden": 3, "dropout": 2})
    assert "model.hiden: unknown option; mlp takes hidden, dropout, batch_norm; did you mean hidden?" in text
    assert "model.dropout: found 2" in text


def test_more_workers_than_shards(tmp_path: Path) -> None:
    text = refusal(tmp_path, train={"virtual_shards": 2}, scaling={"workers": "1..3"})
    assert "scaling.workers: found 1..3, but train.virtual_shards is 2" in text


def test_missing_data(tmp_path: Path) -> None:
    source = str(tmp_path / "digits.npz")
    assert source in refusal(tmp_path, task="mnist", data={"source": source})


def test_storage_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert str(tmp_path / "file") in refusal(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "job.yaml").write_text("name: refused\n")
    text = refusal(tmp_path)
    assert str(tmp_path / "refused") in text
    assert "--resume" in text


def test_resuming_what_is_not_there(tmp_path: Path) -> None:
    raw = {"name": "nothing", "task": "synthetic", "model": {"name": "linear"}, "storage": str(tmp_path)}
    with pytest.raises(RaytrainError, match="there is no run in") as caught:
        runner.run(job_from_dict(raw), resume=True)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_too_few_cpus(tmp_path: Path, ray_local: None) -> None:
    notes: list[str] = []
    raw = {
        "name": "large",
        "task": "synthetic",
        "model": {"name": "linear"},
        "scaling": {"workers": "5..6", "wait_s": 1.0},
        "storage": str(tmp_path),
    }
    with pytest.raises(ClusterError) as caught:
        runner.run(job_from_dict(raw), on_update=lambda update: notes.append(update.text))
    assert caught.value.exit_code == 3
    lack = "the job needs 5 workers of {CPU: 1}, and the cluster has room for 4: 1 node with {CPU: 4} in all"
    assert str(caught.value).startswith(f"{lack}, and no more came within scaling.wait_s = 1 s; ")
    assert f"{lack}; waiting up to 1 s for more" in notes
    assert list(tmp_path.iterdir()) == []


def test_fewer_rows_than_a_batch(tmp_path: Path, ray_local: None) -> None:
    np.savez(
        tmp_path / "three.npz",
        x_train=np.zeros((3, 28, 28), np.uint8),
        y_train=np.arange(3),
        x_test=np.zeros((3, 28, 28), np.uint8),
        y_test=np.arange(3),
    )
    raw = {
        "name": "tiny",
        "task": "mnist",
        "model": {"name": "linear"},
        "data": {"source": str(tmp_path / "three.npz"), "validation_fraction": 0, "classes": 3},
        "checkpoint": {"monitor": "loss"},
        "scaling": {"workers": 4},
        "storage": str(tmp_path / "runs"),
    }
    with pytest.raises(RaytrainError, match=r"there are 3 training rows .* fewer than train\.global_batch_size: 128") as caught:
        runner.run(job_from_dict(raw))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "runs" / "tiny").exists()
    deadline_s = time.monotonic() + 20
    while ray.available_resources().get("CPU") != 4:  # workers had begun to start while the data was read
        assert time.monotonic() < deadline_s, "the refused run still holds CPUs"
        time.sleep(0.2)
