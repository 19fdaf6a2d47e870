"""Whole runs with Keras: killed, stopped, resumed with fewer workers; under tf.distribute; and who loads TensorFlow."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from raytrain_app import runner
from raytrain_app.errors import Interrupted, JobError, TrainingError
from raytrain_app.job import Job, job_from_dict
from raytrain_app.storage.audit import audit_run
from raytrain_app.storage.requests import Request, Requests
from raytrain_app.storage.rundir import RunDirectory
from tests.integration.elastic.disturbed import Action, Disturbed, assert_undisturbed
from tests.integration.replicas import Replicas

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; pip install 'raytrain-app[tensorflow]'", allow_module_level=True)

GIVEN = "tests.integration.given_keras:"


def make_job(storage: Path, **sections: Any) -> Job:
    raw = {
        "name": "keras",
        "task": "synthetic",
        "framework": "tensorflow",
        "model": {"name": "mlp", "hidden": 24, "dropout": 0.2, "batch_norm": True},
        "train": {"epochs": 6, "global_batch_size": 64, "virtual_shards": 4},
        "checkpoint": {"every_steps": 20},
        "scaling": {"workers": 2},
        "storage": str(storage),
        "audit": True,
    }
    return job_from_dict({**raw, **sections})


def kill_leader(run: Disturbed) -> None:
    """The first that joined leads, and its callbacks are called."""
    run.kill(run.seen("join")[0]["worker"])


def stop(run: Disturbed) -> None:
    Requests(run.folder).post(Request(kind="stop"))


def scale(least: int, most: int) -> Action:
    def ask(run: Disturbed) -> None:
        Requests(run.folder).post(Request(kind="scale", least=least, most=most))

    return ask


TELLING: dict[str, Any] = {
    "task": f"{GIVEN}TELLING",
    "optimizer": {"lr": 0.01},
    "train": {"epochs": 6, "global_batch_size": 64, "virtual_shards": 4},
}


@pytest.mark.slow
def test_a_killed_leader_changes_nothing(tmp_path: Path, replicas: Replicas) -> None:
    """Two workers, of which the one dies whose callbacks are called, against one worker that is left alone."""
    known = set(sys.modules)
    run = Disturbed(make_job(tmp_path, **TELLING), {20: kill_leader})
    result = run.run()
    assert not {"tensorflow", "keras", "tf_keras"} & (set(sys.modules) - known)  # the driver has no use for them
    assert len(run.seen("worker_lost")) == 1
    _assert_as_calm(run, result, replicas)


@pytest.mark.slow
def test_a_stop_and_another_number_of_workers_change_nothing(tmp_path: Path, replicas: Replicas) -> None:
    run = Disturbed(make_job(tmp_path, **TELLING), {10: kill_leader, 40: stop})
    with pytest.raises(Interrupted):
        run.run()
    resumed = Disturbed(make_job(tmp_path, **TELLING, scaling={"workers": 3}))
    _assert_as_calm(resumed, resumed.run(resume=True), replicas)
    assert resumed.seen("generation")[-1]["workers"] == 3


@pytest.mark.slow
def test_joins_leaves_and_a_full_loss_change_nothing(tmp_path: Path, replicas: Replicas) -> None:
    actions = {
        60: scale(1, 1),
        150: scale(1, 3),
        400: lambda run: run.kill(min(run.pids)),
        700: lambda run: run.kill(*run.pids),
    }
    sections = {**TELLING, "task": f"{GIVEN}SLOW", "train": {**TELLING["train"], "epochs": 60}}
    run = Disturbed(make_job(tmp_path, **sections, scaling={"workers": "1..3"}), actions)
    result = run.run()
    calm = make_job(tmp_path, **sections)
    assert_undisturbed(run, result, replicas.run(calm, 1, replicas.load(calm)).summary)
    assert {"join", "leave", "worker_lost", "resume"} <= {event["kind"] for event in run.events}


def _assert_as_calm(run: Disturbed, result: dict[str, Any], replicas: Replicas) -> None:
    """Bits, metrics, rows and what callbacks were told are those of one undisturbed worker."""
    calm = make_job(Path(run.job.storage), **TELLING)
    expected = replicas.run(calm, 1, replicas.load(calm))
    for name in ("status", "epochs", "weights_sha256", "test_loss"):
        assert result[name] == expected.summary[name]
    assert result["epochs"] > 3
    assert result["steps_redone"] == 0
    found = RunDirectory.open(run.folder.uri).read_metrics()
    kept = [{k: v for k, v in record.items() if k not in ("time", "workers", "ids")} for record in found]
    assert kept == [{k: v for k, v in record.items() if k != "ids"} for record in expected.comparable]
    assert all(epoch.exact for epoch in audit_run(run.folder))
    epochs = {record["epoch"] - 1: record["val_loss"] for record in kept if record["kind"] == "epoch"}
    folder = Path(run.job.storage) / run.job.name / "keras"
    told = [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]
    assert {t["number"]: t["val_loss"] for t in told if t["hook"] == "epoch_end"} == epochs
    with (folder / "log.csv").open() as file:
        assert {int(line["epoch"]): float(line["val_loss"]) for line in csv.DictReader(file)} == epochs


@pytest.mark.slow
def test_mirrored_devices_of_one_worker(tmp_path: Path, ray_local: None) -> None:
    """Two logical CPUs train copies; what is saved is read by Keras 3, with callbacks that see it too."""
    job = make_job(
        tmp_path,
        task=f"{GIVEN}TELLING",
        model={"name": "mlp", "hidden": 24, "batch_norm": True},
        train={"epochs": 3, "global_batch_size": 64, "reduction": "fast"},
        strategy={"name": "allreduce", "tf_distribute": "mirrored"},
        scaling={"workers": 1, "resources_per_worker": {"CPU": 2}},
        optimizer={"lr": 0.02},
    )
    result = runner.run(job).record
    assert result["status"] in ("finished", "early_stopped")
    assert result["test_accuracy"] > 0.9
    assert result["computes_on"][0]["tf_keras"]
    saved = tmp_path / "keras/keras"
    assert (saved / "told.jsonl").exists()
    import keras

    model = keras.models.load_model(saved / "epoch-1.keras")
    assert sum(int(variable.value.numpy().size) for variable in model.weights) == 24 * 16 + 24 + 4 * 24 + 24 * 4 + 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["central_storage", "one_device"])
def test_other_strategies_of_one_worker(kind: str, tmp_path: Path, ray_local: None) -> None:
    job = make_job(
        tmp_path,
        train={"epochs": 3, "global_batch_size": 64, "reduction": "fast"},
        strategy={"name": "allreduce", "tf_distribute": kind},
        scaling={"workers": 1, "resources_per_worker": {"CPU": 2}},
        optimizer={"lr": 0.02},
    )
    assert runner.run(job).record["test_accuracy"] > 0.9


@pytest.mark.slow
def test_a_group_that_loses_a_worker_goes_on_as_a_new_one(tmp_path: Path, ray_local: None) -> None:
    """Then it is stopped, and resumed as a group of another size."""
    sections: dict[str, Any] = {
        "train": {"epochs": 12, "global_batch_size": 64, "virtual_shards": 2, "reduction": "fast"},
        "strategy": {"name": "allreduce", "tf_distribute": "multi_worker_mirrored"},
        "optimizer": {"lr": 0.005},
    }
    run = Disturbed(make_job(tmp_path, **sections), {60: kill_leader, 110: stop})
    with pytest.raises(Interrupted):
        run.run()
    stopped = RunDirectory.open(run.folder.uri).read_result()
    assert stopped is not None
    (receipt,) = stopped["disruptions"]
    assert receipt["cause"] == "worker_lost"
    assert receipt["workers_before"] == receipt["workers_after"] == 2
    assert len(run.seen("worker_lost")) == 1
    assert len(run.seen("join")) == 4
    result = runner.run(make_job(tmp_path, **sections, scaling={"workers": 1}), resume=True).record
    assert result["status"] == "finished"
    assert result["test_accuracy"] > 0.9
    steps = [record for record in RunDirectory.open(run.folder.uri).read_metrics() if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, result["steps"] + 1))
    assert [steps[0]["workers"], steps[-1]["workers"]] == [2, 1]


@pytest.mark.slow
def test_a_keras_3_model_under_tf_distribute_is_refused(tmp_path: Path, ray_local: None) -> None:
    job = make_job(
        tmp_path,
        task=f"{GIVEN}KERAS_ONLY",
        train={"epochs": 1, "global_batch_size": 64, "reduction": "fast"},
        strategy={"name": "allreduce", "tf_distribute": "one_device"},
        scaling={"workers": 1},
    )
    with pytest.raises(TrainingError, match=r"tf.distribute needs a model of tf_keras, so build it with the argument keras"):
        runner.run(job)


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path, train={"reduction": "fast"}, strategy={"tf_distribute": "multi_worker_mirrored"})
    for name in ("tf_keras", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        JobError, match=r"needs tensorboard and tf_keras, not installed here; pip install 'raytrain-app\[tensorflow\]'"
    ):
        runner.run(job)


@pytest.mark.slow
def test_tensorflow_is_loaded_only_where_it_trains(tmp_path: Path, repository: Path) -> None:
    """Neither by the driver of a Keras job, nor by a worker of a PyTorch job; on machines that ask for legacy Keras, too."""
    program = """
        import sys
        from raytrain_app import runner
        from raytrain_app.job import job_from_dict

        for name, framework, task in (("k", "tensorflow", "synthetic"), ("t", "torch", "tests.integration.given_keras:ALONE")):
            runner.run(job_from_dict({
                "name": name, "framework": framework, "task": task, "model": {"name": "linear"}, "storage": sys.argv[1],
                "train": {"global_batch_size": 500},
            }))
        assert not {"tensorflow", "keras", "tf_keras"} & set(sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        cwd=repository,
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
