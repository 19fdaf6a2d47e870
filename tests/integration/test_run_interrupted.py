"""Stopped, damaged, resumed: runs of a user's own task from the command line, several at once, end as if undisturbed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytrain_app.errors import JobError
from raytrain_app.job import load_job
from raytrain_app.storage.rundir import RunDirectory

LIMIT_S = 240.0
STEPS = 2 * 113


class Command:
    """A `raytrain run` of examples/custom_task.yaml, in a session of its own as a terminal has it."""

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._seen: dict[int, psutil.Process] = {}
        number = len(list(folder.iterdir()))
        self._output, self._errors = folder / f"{number}.out", folder / f"{number}.err"
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "raytrain_app", "run", "custom_task.yaml", *arguments],
                cwd=folder,
                env={**os.environ, **(environment or {})},
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def printed(self) -> str:
        """Its standard output."""
        return self._output.read_text()

    @property
    def said(self) -> str:
        """Its standard error."""
        return self._errors.read_text()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition` holds, while the command runs."""
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            assert self._process.poll() is None, self.said
            assert time.monotonic() < deadline_s, self.said
            self._look()
            time.sleep(0.02)

    def interrupt(self) -> None:
        """What Ctrl-C in a terminal does: a signal to all processes of the session's foreground."""
        self._look()
        os.killpg(self._process.pid, signal.SIGINT)

    def end(self) -> int:
        """Waits for the end and returns the exit code."""
        return self._process.wait(LIMIT_S)

    def left_behind(self) -> list[psutil.Process]:
        """Processes that the command started, seen while it ran, which live on."""
        return psutil.wait_procs(list(self._seen.values()), timeout=10)[1]

    def _look(self) -> None:
        for process in psutil.Process(self._process.pid).children(recursive=True):
            self._seen.setdefault(process.pid, process)


def lines(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = run / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def result(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "result.json").read_text()))


def comparable(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in ("time", "workers")} for line in lines(run)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example of a user's own task, made shorter, as a user has it."""
    folder = tmp_path_factory.mktemp("project")
    examples = Path(__file__).parents[2] / "examples"
    shutil.copy(examples / "custom_task.py", folder)
    text = (examples / "custom_task.yaml").read_text()
    short = {
        "width: 16": "width: 4",
        "epochs: 3": "epochs: 2",
        "workers: 1..2": "workers: 1..2\n  resources_per_worker: {CPU: 0.5}",
    }
    for old, new in short.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "custom_task.yaml").write_text(f"{text}checkpoint: {{every_steps: 10, keep: 4}}\n")
    return folder


@pytest.fixture(scope="module")
def stopped(project: Path) -> Command:
    """A run with two workers which Ctrl-C stops in its first epoch."""
    stopped = Command(project, "--name", "stopped", "--set", "scaling.workers=2")
    stopped.wait_for(lambda: len(lines(project / "runs" / "stopped")) >= 25)
    stopped.interrupt()
    assert stopped.end() == 130, stopped.said
    return stopped


def test_ctrl_c_ends_after_the_step_with_a_checkpoint(stopped: Command, project: Path) -> None:
    run = project / "runs" / "stopped"
    ended = result(run)
    assert ended["status"] == "stopped"
    assert 25 <= ended["steps"] < STEPS
    assert lines(run)[-1]["step"] == ended["steps"]
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{ended['steps']:08d}"
    assert "--resume" in stopped.said.splitlines()[-1]
    assert stopped.printed == ""
    assert stopped.left_behind() == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("optimizer.lr=0.1", "optimizer.lr: 0.002 before, 0.1 now"),
        ("train.virtual_shards=2", "train.virtual_shards: 4 before, 2 now"),
        ("model.width=8", "model.width: 4 before, 8 now"),
        ("train.seed=1", "train.seed: 0 before, 1 now"),
        ("data.validation_fraction=0.2", "data.validation_fraction: 0.1 before, 0.2 now"),
    ],
)
def test_resuming_a_changed_job_is_refused(change: str, named: str, stopped: Command, project: Path) -> None:
    run = project / "runs" / "stopped"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    job = load_job(str(project / "custom_task.yaml"), [f"storage={project / 'runs'}", change], "stopped")
    with pytest.raises(JobError, match="cannot be resumed") as caught:
        RunDirectory.reopen(job)
    assert named in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.slow
def test_resumed_runs_end_as_if_undisturbed(stopped: Command, project: Path) -> None:
    """With three workers from the newest checkpoint, and with one from the one before it since the newest is damaged."""
    undisturbed = Command(project, "--name", "calm", "--set", "scaling.workers=1")
    stopped_at = result(project / "runs" / "stopped")["steps"]
    shutil.copytree(project / "runs" / "stopped", project / "elsewhere" / "stopped")
    newest = project / "elsewhere" / "stopped" / "checkpoints" / f"step-{stopped_at:08d}" / "weights.safetensors"
    content = newest.read_bytes()
    newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = ("--resume", "--name", "stopped", "--set")
    three = Command(project, *again, "scaling.workers=3")
    damaged = Command(project, *again, "scaling.workers=1", "--set", "storage=elsewhere")
    assert three.end() == 0, three.said
    assert damaged.end() == 0, damaged.said
    assert undisturbed.end() == 0, undisturbed.said

    calm = project / "runs" / "calm"
    assert result(calm)["steps"] == STEPS
    assert result(calm)["test_accuracy"] > 0.8
    for run in (project / "runs" / "stopped", project / "elsewhere" / "stopped"):
        assert result(run)["weights_sha256"] == result(calm)["weights_sha256"]
        assert result(run)["test_loss"] == result(calm)["test_loss"]
        assert comparable(run) == comparable(calm)
    assert {line["workers"] for line in lines(project / "runs" / "stopped")} == {2, 3}

    resumed = [event["step"] for event in lines(project / "runs" / "stopped", "events.jsonl") if event["kind"] == "resume"]
    assert resumed == [stopped_at]
    before = (stopped_at - 1) // 10 * 10
    resumed = [event["step"] for event in lines(project / "elsewhere" / "stopped", "events.jsonl") if event["kind"] == "resume"]
    assert resumed == [before]
    assert f"{newest.parent} cannot be used: weights.safetensors has other bytes than were written" in damaged.said


@pytest.mark.slow
def test_runs_that_cannot_go_on(project: Path) -> None:
    """Three at once: an error on one worker, a wrong network interface, and Ctrl-C while there are too few CPUs."""
    folder = project / "faulty"
    shutil.copytree(project, folder, ignore=shutil.ignore_patterns("runs", "elsewhere"))
    task = (folder / "custom_task.py").read_text()
    (folder / "custom_task.py").write_text(
        task.replace(
            "        down, right =",
            "        if x.sum() > 0 and torch.initial_seed() % 50 == 7:\n"
            '            raise ArithmeticError("spilled the tea")\n'
            "        down, right =",
        )
    )
    faulty = Command(folder, "--set", "scaling.workers=2")
    wrong = Command(project, "--name", "wrong", environment={"GLOO_SOCKET_IFNAME": "^lo"})
    waiting = Command(project, "--name", "waiting", "--set", "scaling.resources_per_worker.CPU=1000")
    waiting.wait_for(lambda: "waiting up to 300 s for more" in waiting.said)
    waiting.interrupt()
    faulty.wait_for(lambda: bool(lines(folder / "runs" / "digit-parity")))
    assert faulty.end() == 4
    assert wrong.end() == 3

    assert 'custom_task.py", line' in faulty.said
    assert "in torch_augment" in faulty.said
    assert faulty.said.splitlines()[-1] == "ArithmeticError: spilled the tea"
    run = folder / "runs" / "digit-parity"
    assert result(run)["status"] == "failed"
    assert result(run)["error"] == "ArithmeticError: spilled the tea"
    finished = lines(run, "events.jsonl")[-1]
    assert finished["kind"] == "finish"
    assert finished["time"] - lines(run)[-1]["time"] < 10
    assert faulty.left_behind() == []

    assert wrong.said.splitlines()[-1].startswith("GLOO_SOCKET_IFNAME is '^lo', which is no network interface of")
    assert lines(project / "runs" / "wrong") == []

    assert waiting.end() == 130
    assert "the job needs 1 worker of {CPU: 1000}" in waiting.said
    assert not (project / "runs" / "waiting").exists()
    assert waiting.left_behind() == []
