"""Whole runs from the command line, in processes of their own: what is printed, what is left, and the exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

START_S = 120.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "raytrain_app", *arguments]


def raytrain(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True, timeout=200, check=False)


def table(printed: str) -> dict[str, str]:
    return {line[:21].rstrip(): line[21:] for line in printed.splitlines()}


def result_of(run_directory: Path) -> dict[str, Any]:
    return dict(json.loads((run_directory / "result.json").read_text()))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A starter project, shortened to one epoch."""
    assert raytrain("init", "project", folder=tmp_path).returncode == 0
    job = tmp_path / "project" / "job.yaml"
    job.write_text(job.read_text().replace("epochs: 3", "epochs: 1"))
    return job.parent


@pytest.mark.slow
def test_the_starter_project_trains_as_it_is(project: Path) -> None:
    done = raytrain("run", "job.yaml", "--quiet", folder=project)
    assert (done.returncode, done.stderr) == (0, "")
    printed, result = table(done.stdout), result_of(project / "runs" / "my-model")
    assert printed["status"] == result["status"] == "finished"
    assert printed["test accuracy"] == f"{result['test_accuracy']:.4f}"
    assert printed["weights sha256"] == result["weights_sha256"]
    assert printed["run directory"] == str(project / "runs" / "my-model")
    assert result["test_accuracy"] > 0.8

    status = raytrain("status", "--json", folder=project)  # of the newest run
    assert json.loads(status.stdout)["metrics"]["test_loss"] == result["test_loss"]
    draw_seven(project / "photo.jpg")
    (predicted,) = raytrain("predict", "my-model", "photo.jpg", folder=project).stdout.splitlines()
    assert predicted.startswith("photo.jpg: 7 (")
    assert "inverted, since it was dark on light; ink cut out of 900 x 600" in predicted

    again = raytrain("run", "job.yaml", folder=project)
    assert again.returncode == 2
    assert again.stdout == ""
    assert "--resume" in again.stderr
    assert result_of(project / "runs" / "my-model") == result


def draw_seven(path: Path) -> None:
    """Somebody's own digit: dark ink on bright paper, large, and not in the middle."""
    image = Image.new("RGB", (900, 600), (238, 232, 220))
    ImageDraw.Draw(image).line([(500, 120), (640, 120), (560, 330)], fill=(30, 40, 90), width=26, joint="curve")
    image.save(path)


@pytest.mark.slow
def test_the_starter_project_for_keras_trains_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    assert raytrain("init", "--framework", "tensorflow", folder=tmp_path).returncode == 0
    done = raytrain("run", "job.yaml", "--quiet", "--set", "train.epochs=1", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(table(done.stdout)["test accuracy"]) > 0.8
    exported = raytrain("export", "--to", "keras", folder=tmp_path)
    assert "the same predictions" in exported.stdout
    assert (tmp_path / "my-model.keras").exists()


@pytest.mark.slow
def test_an_error_in_the_task_shows_its_own_traceback(project: Path) -> None:
    task = project / "task.py"
    task.write_text(
        task.read_text().replace(
            "        return nn.Sequential(", '        raise ArithmeticError("spilled the tea")\n        nn.Sequential('
        )
    )
    done = raytrain("run", "job.yaml", folder=project)
    assert done.returncode == 4
    assert done.stdout == ""
    assert 'task.py", line' in done.stderr
    assert "ArithmeticError: spilled the tea" in done.stderr
    assert "run again with --debug" not in done.stderr
    assert result_of(project / "runs" / "my-model")["status"] == "failed"


@pytest.mark.slow
def test_ctrl_c_then_resume_ends_like_an_undisturbed_run(project: Path) -> None:
    epochs = ("--set", "train.epochs=6", "--set", "scaling.resources_per_worker.CPU=0.5")
    assert raytrain("run", "job.yaml", "--name", "calm", *epochs, folder=project).returncode == 0

    stopped = subprocess.Popen(
        command("run", "job.yaml", "--name", "stopped", *epochs), cwd=project, stderr=subprocess.PIPE, text=True
    )
    metrics = project / "runs" / "stopped" / "metrics.jsonl"
    deadline_s = time.monotonic() + START_S
    while not (metrics.exists() and metrics.stat().st_size):
        assert stopped.poll() is None, "the run ended before it could be stopped"
        assert time.monotonic() < deadline_s, "no step within the time limit"
        time.sleep(0.05)
    os.kill(stopped.pid, signal.SIGINT)
    _, said = stopped.communicate(timeout=60)
    assert stopped.returncode == 130
    assert "--resume" in said
    steps = result_of(project / "runs" / "stopped")["steps"]
    assert 0 < steps < 6 * 113

    resume = ("run", "job.yaml", "--name", "stopped", "--resume", *epochs)
    refused = raytrain(*resume, "--set", "optimizer.lr=0.5", folder=project)
    assert refused.returncode == 2
    assert "optimizer.lr" in refused.stderr
    assert raytrain(*resume, "--set", "scaling.workers=1", folder=project).returncode == 0
    calm, resumed = (result_of(project / "runs" / name) for name in ("calm", "stopped"))
    assert resumed["status"] == "finished"
    for key in ("weights_sha256", "steps", "samples", "val_loss", "test_loss", "test_accuracy"):
        assert resumed[key] == calm[key], key
