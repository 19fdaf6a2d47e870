"""Whoever tells of a run tells the same: result.json, status, watch, TensorBoard, the report and the trackers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raytrain_app.inference.evaluations import evaluate_run
from raytrain_app.inference.preview import write_preview
from raytrain_app.inference.trained import load_trained
from raytrain_app.report.history import read_history
from raytrain_app.report.state import read_state
from raytrain_app.report.watch import views
from raytrain_app.storage.rundir import RunDirectory
from tests.integration.report.conftest import Run


def raytrain(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "raytrain_app", *arguments],
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "120", **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_status_and_watch_agree_with_the_result(run: Run) -> None:
    state = read_state(run.folder)
    *_, view = views(run.folder)
    assert view.state == state
    assert state.status == run.result["status"]
    assert (state.step, state.samples, state.epoch) == (run.result["steps"], run.result["samples"], run.result["epochs"])
    for name in ("train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy"):
        assert state.metrics[name] == run.result[name]
    assert state.samples_per_s == run.result["samples_per_s"]
    history = read_history(RunDirectory(run.folder))
    assert history.epochs["val_loss"][-1] == run.result["val_loss"]
    assert history.epochs["loss"][-1] == run.result["train_loss"]
    assert history.num_steps == run.result["steps"]


def test_tensorboard_agrees_and_shows_rows_and_graph(run: Run) -> None:
    write_preview(load_trained(run.folder), run.folder)
    assert run.folder.local_path is not None
    board = EventAccumulator(str(run.folder.local_path / "tensorboard"))
    board.Reload()
    tags = board.Tags()
    assert len([name for name in run.folder.files() if "tfevents" in name]) == 2  # one file of two workers, and the preview
    assert board.Scalars("epoch/val_loss")[-1].value == pytest.approx(run.result["val_loss"], rel=1e-6)
    assert board.Scalars("epoch/val_accuracy")[-1].value == pytest.approx(run.result["val_accuracy"], rel=1e-6)
    assert len(board.Scalars("step/workers")) == run.result["steps"]
    assert tags["images"] == ["training rows"]
    assert board.Images("training rows")[0].width == 10 * 30 * 2
    assert tags["graph"] is True
    assert {"input/x", "output/output.1"} & {node.name for node in board.Graph().node}


@pytest.mark.slow
def test_tensorboard_is_served(run: Run) -> None:
    command = [sys.executable, "-m", "raytrain_app", "tensorboard", str(run.folder.local_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as board:
        assert board.stdout is not None
        url = re.search(r"http://\S+/", board.stdout.readline())
        assert url is not None
        wanted = {"scalars": "epoch/val_loss", "images": "training rows"}
        for plugin, tag in wanted.items():
            with urllib.request.urlopen(f"{url[0]}data/plugin/{plugin}/tags", timeout=30) as page:
                assert tag in json.load(page)["tensorboard"]
        with urllib.request.urlopen(f"{url[0]}data/plugin/graphs/info", timeout=30) as page:
            assert json.load(page)["tensorboard"]["run_graph"] is True
        board.send_signal(signal.SIGINT)
        assert board.wait(30) == 130


def test_the_commands_agree(run: Run) -> None:
    name = str(run.folder.local_path)
    listed = raytrain("list", run.job.storage, "--json")
    assert [state["metrics"]["test_loss"] for state in json.loads(listed.stdout)] == [run.result["test_loss"]]
    evaluated = raytrain("evaluate", name, "--json")
    assert evaluated.stderr == ""
    assert json.loads(evaluated.stdout)["loss"] == run.result["test_loss"]
    watched = raytrain("watch", name)
    assert f"test_loss {run.result['test_loss']:.4f}" in watched.stdout.splitlines()[-1]
    compared = raytrain("compare", name, name)
    assert "All of them ended with the same weights" in compared.stdout


def test_a_report_needs_no_ray_where_the_run_has_been_evaluated(run: Run, tmp_path: Path) -> None:
    evaluate_run(load_trained(run.folder), run.folder, "test")
    copy = tmp_path / "copy"
    shutil.copytree(str(run.folder.local_path), copy)
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['ray', 'torch']))  # as if they were not installed\n"
        "from raytrain_app.cli import main\n"
        f"main(['report', {str(copy)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    html, data = (copy / "report.html").read_text(), (copy / "data.sha256").read_text().strip()
    for number in (
        f"{100 * run.result['test_accuracy']:.2f} %",
        f"{run.result['test_loss']:.4g}",
        run.result["weights_sha256"],
        data,
    ):
        assert number in html
    assert {path.name for path in (copy / "plots").iterdir()} >= {"loss.png", "accuracy.png", "workers.png", "confusion.png"}
    shutil.rmtree(copy / "evaluations")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0
    assert re.search(r"has not been evaluated, and cannot be here: .*(ray|torch)", (copy / "report.html").read_text())


def test_a_folder_that_cannot_be_written_is_an_error_that_says_what_to_do(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = raytrain("report", str(run.folder.local_path), "--no-evaluate", "--out", str(tmp_path / "file" / "in"))
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
