"""The run directory: one name one run, the same job and the same data on resuming, and files that always can be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raytrain_app.errors import DataError, JobError, StorageError
from raytrain_app.job import Job, job_from_dict
from raytrain_app.state import TrainState
from raytrain_app.storage.checkpoints import CheckpointStore
from raytrain_app.storage.rundir import RunDirectory, require_shared
from raytrain_app.storage.tensorboard import TensorBoardWriter


def make_job(storage: Path, *overrides: str) -> Job:
    return job_from_dict({"name": "first", "task": "mnist", "model": {"name": "cnn"}, "storage": str(storage)}, overrides)


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    job = make_job(tmp_path / "runs")
    directory = RunDirectory.reserve(job)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind when the run is refused after all
    with directory.writing("abc"):
        directory.append_metrics([{"kind": "step", "step": 1, "loss": 0.5}])
        directory.append_metrics([{"kind": "step", "step": 2, "loss": float("nan")}])
        directory.append_events([{"kind": "start"}])
        assert len(directory.read_metrics()) == 2
        assert directory.read_result() is None
        directory.write_result({"status": "finished", "val_loss": float("nan")})
    again = RunDirectory.open(directory.uri)
    assert again.uri == str(tmp_path / "runs" / "first")
    assert again.read_job() == job
    assert again.read_metrics() == [{"kind": "step", "step": 1, "loss": 0.5}, {"kind": "step", "step": 2, "loss": None}]
    assert again.read_events() == [{"kind": "start"}]
    assert again.read_result() == {"status": "finished", "val_loss": None}


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    one, two = (RunDirectory.reserve(make_job(tmp_path)) for _ in range(2))
    with one.writing("abc"):
        for attempt in (lambda: RunDirectory.reserve(make_job(tmp_path)), lambda: two.writing("abc").__enter__()):
            with pytest.raises(StorageError, match=f"{tmp_path}/first exists already; go on with that run by --resume"):
                attempt()
    assert RunDirectory.reserve(make_job(tmp_path, "name=second")).uri == str(tmp_path / "second")


def test_resuming_keeps_what_is_there(tmp_path: Path) -> None:
    first = RunDirectory.reserve(make_job(tmp_path))
    with first.writing("abc"):
        first.append_metrics([{"step": 1}])
        first.write_result({"status": "stopped"})
    with (tmp_path / "first" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "los')
    job = make_job(tmp_path, "failure.max_restarts=3", "data.offline=true")
    again = RunDirectory.reopen(job)
    with again.writing("abc"):
        assert again.read_metrics() == [{"step": 1}]
        assert again.read_result() is None
        again.append_metrics([{"step": 2}])
    assert again.read_metrics() == [{"step": 1}, {"step": 2}]
    assert again.read_job() == job


def test_resuming_with_another_job_names_the_differences(tmp_path: Path) -> None:
    with RunDirectory.reserve(make_job(tmp_path)).writing("abc"):
        pass
    with pytest.raises(JobError) as caught:
        RunDirectory.reopen(make_job(tmp_path, "optimizer.lr=0.5", "model.name=mlp"))
    assert 'model.name: "cnn" before, "mlp" now; optimizer.lr: 0.001 before, 0.5 now' in str(caught.value)


def test_resuming_on_other_data_is_refused(tmp_path: Path) -> None:
    with RunDirectory.reserve(make_job(tmp_path)).writing("abc"):
        pass
    with (
        pytest.raises(DataError, match=r"was started with other data \(sha256 abc\.\.\., now abd\.\.\.\)"),
        RunDirectory.reopen(make_job(tmp_path)).writing("abd"),
    ):
        pass


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with RunDirectory.reserve(make_job(tmp_path)).writing("abc"):
        pass
    with pytest.raises(StorageError, match=r"there is no run in .*/frist \(no job\.yaml\); did you mean first\?"):
        RunDirectory.open(str(tmp_path / "frist"))
    with pytest.raises(StorageError, match=r"there is no run in .*/other \(no job\.yaml\); check its name and `storage`"):
        RunDirectory.reopen(make_job(tmp_path, "name=other"))


def test_storage_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot write to .*/file/runs/first"):
        RunDirectory.reserve(make_job(tmp_path / "file" / "runs"))


def test_a_worker_that_does_not_see_the_run_says_so(tmp_path: Path) -> None:
    directory = RunDirectory.reserve(make_job(tmp_path))
    with directory.writing("abc"):
        require_shared(directory.uri)
    with pytest.raises(
        StorageError, match=f"does not see the run directory {tmp_path}/elsewhere; `storage` must be reachable by every"
    ):
        require_shared(str(tmp_path / "elsewhere"))


def test_the_best_checkpoint(tmp_path: Path) -> None:
    directory = RunDirectory.reserve(make_job(tmp_path))
    with directory.writing("abc"):
        assert directory.best_checkpoint() is None
        store = CheckpointStore(directory.checkpoints, 3, "val_loss", "min")
        store.save(1, TrainState({}), {})
        assert directory.best_checkpoint() == f"{tmp_path}/first/checkpoints/step-00000001"
        store.save(2, TrainState({}), {"val_loss": 0.1})
        store.save(3, TrainState({}), {"val_loss": 0.2})
        assert directory.best_checkpoint() == f"{tmp_path}/first/checkpoints/step-00000002"


def test_tensorboard_shows_the_same_numbers(tmp_path: Path) -> None:
    directory = RunDirectory.reserve(make_job(tmp_path))
    with directory.writing("abc"):
        _write_scalars(directory, step=1, loss=0.5)
    again = RunDirectory.reopen(make_job(tmp_path))
    with again.writing("abc"):
        _write_scalars(again, step=2, loss=0.25)
    shown = EventAccumulator(str(tmp_path / "first" / "tensorboard"))
    shown.Reload()
    assert set(shown.Tags()["scalars"]) == {"step/loss", "step/lr"}
    assert [(event.step, event.value, event.wall_time) for event in shown.Scalars("step/loss")] == [
        (1, 0.5, 1e9 + 1),
        (2, 0.25, 1e9 + 2),
    ]


def _write_scalars(directory: RunDirectory, step: int, loss: float) -> None:
    writer = TensorBoardWriter(directory)
    writer.add([{"kind": "step", "epoch": 1, "step": step, "time": 1e9 + step, "loss": loss, "lr": 1e-3, "note": "x"}])
    writer.add(
        [{"kind": "epoch", "epoch": 1, "step": step, "time": 1e9, "val_loss": None, "loss": float("nan")}, {"kind": "start"}]
    )
    writer.close()
