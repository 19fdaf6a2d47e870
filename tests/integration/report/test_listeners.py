"""Metrics at Ray's Prometheus endpoint, and experiment trackers."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raytrain_app import runner
from raytrain_app.job import Job, job_from_dict
from raytrain_app.report import metrics
from raytrain_app.report.trackers import Tracking
from raytrain_app.report.updates import Update
from raytrain_app.storage.rundir import RunDirectory
from tests.integration.report.conftest import Run

SCRIPT = """
import json, sys, time, urllib.request
import ray
from raytrain_app import runner
from raytrain_app.job import job_from_dict

port, storage = int(sys.argv[1]), sys.argv[2]
ray.init(address="local", num_cpus=2, include_dashboard=True, dashboard_port=0, log_to_driver=False, _metrics_export_port=port)
job = job_from_dict({"name": "m", "task": "synthetic", "model": {"name": "linear"}, "train": {"epochs": 3}, "storage": storage})
result = runner.run(job)
deadline = time.time() + 60
while time.time() < deadline:
    page = urllib.request.urlopen(f"http://{ray.util.get_node_ip_address()}:{port}/metrics", timeout=10).read().decode()
    if "raytrain_checkpoints_total" in page:
        break
    time.sleep(1)
from ray.train.v2._internal.state.state_actor import get_state_actor
runs = ray.get(get_state_actor().get_train_runs.remote())
shown = {"names": [run.name for run in runs.values()]}
print(json.dumps({"result": result.record, "page": page, **shown}))
ray.shutdown()
"""


def make_job(folder: Path, **keys: object) -> Job:
    common = {"name": "tracked", "task": "synthetic", "model": {"name": "linear"}, "train": {"epochs": 3}}
    return job_from_dict({**common, "storage": str(folder), **keys})


@pytest.mark.slow
def test_metrics_reach_prometheus_and_pools_the_dashboard(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(port), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
        env={**os.environ, "RAY_TRAIN_ENABLE_STATE_TRACKING": "1"},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    samples = dict(re.findall(r'^(ray_raytrain_\w+)\{[^}]*run="m"[^}]*\} (\S+)$', found["page"], re.MULTILINE))
    assert float(samples["ray_raytrain_validation_loss"]) == pytest.approx(found["result"]["val_loss"])
    assert float(samples["ray_raytrain_steps"]) == found["result"]["steps"]
    for key, (name, about) in metrics.GAUGES.items():
        assert (f"# HELP ray_{name} {about}" in found["page"]) == (key != "tokens")  # which these rows do not have
    assert found["names"] == ["m-pool-0"]


def test_the_grafana_dashboard_asks_for_metrics_that_there_are() -> None:
    source = Path(metrics.__file__)
    known = set(re.findall(r'"(raytrain_\w+)"', source.read_text()))
    dashboard = json.loads((source.parent / "grafana.json").read_text())
    asked = {
        name for panel in dashboard["panels"] for t in panel["targets"] for name in re.findall(r"ray_(raytrain_\w+)", t["expr"])
    }
    assert asked
    assert asked <= known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_mlflow_has_the_numbers_of_the_result(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    _track("mlflow", run)
    _assert_tracked(run)
    _track("mlflow", run)  # as a resumed run does
    _assert_tracked(run)


@pytest.mark.slow
def test_mlflow_over_its_own_server(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")  # with sqlalchemy, all that MLflow's server needs beside mlflow-skinny
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/m.db"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as server:
        try:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
            _wait_for(port)
            _track("mlflow", run)
            _assert_tracked(run)
        finally:
            server.terminate()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)


def _track(name: str, run: Run) -> None:
    """Tells a tracker of everything that happened in the run."""
    told: list[Update] = []
    with Tracking(name, run.job, run.folder.uri, told.append) as tracking:
        for record in RunDirectory(run.folder).read_metrics():
            tracking.take(Update(record["kind"], "", record))
        tracking.take(Update("result", "", run.result))
    assert told == []


def _assert_tracked(run: Run) -> None:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("raytrain")
    assert experiment is not None
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["optimizer.name"] == "adam"
    assert tracked.data.tags["raytrain.weights_sha256"] == run.result["weights_sha256"]
    for name in ("test_loss", "test_accuracy", "val_loss", "train_loss", "samples"):
        assert tracked.data.metrics[name] == pytest.approx(run.result[name])
    history = client.get_metric_history(tracked.info.run_id, "epoch/val_loss")
    assert {point.step for point in history} == {72, 144}


@pytest.mark.slow
def test_a_tracker_that_fails_is_named_once_and_training_goes_on(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    told: list[Update] = []
    done = runner.run(make_job(tmp_path, trackers=["mlflow"]), on_update=told.append)
    assert done.record["status"] == "finished"
    notes = [update.text for update in told if update.text.startswith("mlflow: ")]
    assert len(notes) == 1
    assert notes[0].endswith("the run goes on without it")


def test_weights_and_biases_offline(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    _track("wandb", run)
    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"test_accuracy" in content
    assert run.result["weights_sha256"].encode() in content
