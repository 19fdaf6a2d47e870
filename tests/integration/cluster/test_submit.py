"""`raytrain submit` and plain `ray job submit`, from a project's folder to a head on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.integration.cluster.conftest import TOKEN, Head, wait_for

TASK = """
import os

from raytrain_app.tasks.synthetic import Synthetic
from shapes_of_mine import HIDDEN


class Checked(Synthetic):
    def torch_model(self, name, options):
        assert os.environ["FOR_THE_TASK"] == "it came through"
        return super().torch_model(name, options)


TASK = Checked()
"""
JOB = """
name: submitted
task: my_task:TASK
model: {{name: linear}}
train: {{epochs: {epochs}, global_batch_size: 50}}
checkpoint: {{every_steps: 20}}
tensorboard: false
storage: {storage}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of two modules, of which an ignore file names one."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "my_task.py").write_text(TASK)
    (folder / "shapes_of_mine.py").write_text("HIDDEN = 3\n")
    (folder / ".gitignore").write_text("shapes*\n")
    write_job(folder, epochs=1)
    return folder


def write_job(project: Path, epochs: int) -> None:
    (project / "job.yaml").write_text(JOB.format(epochs=epochs, storage=project.parent / "runs"))


@contextmanager
def raytrain(head: Head, project: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The command, running in the project's folder; it is ended with the block."""
    command = [sys.executable, "-m", "raytrain_app", *arguments]
    own = {**head.environment, "FOR_THE_TASK": "it came through", **environment}
    process = subprocess.Popen(command, cwd=project, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def outcome(head: Head, project: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    with raytrain(head, project, *arguments, **environment) as process:
        out, err = process.communicate(timeout=280)
        return process.returncode, out, err


def ours(head: Head) -> list[str]:
    """Processes of a run: its workers, their controllers and our own actors."""
    return [name for name in head.names() if re.match("ray::.*(Train|Membership|Vault)", name)]


def driver_of(name: str) -> psutil.Process | None:
    """The driver of the submitted job, once it runs."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        line = process.info["cmdline"] or []
        if "raytrain-job.yaml" in line and "python" in Path(line[0]).name and name in (process.info["cwd"] or ""):
            return process
    return None


@pytest.mark.slow
def test_a_job_with_its_ignored_module_and_its_variable(head: Head, project: Path) -> None:
    code, out, err = outcome(head, project, "submit", "job.yaml", "--address", head.url, "--env", "FOR_THE_TASK")
    assert code == 0, out + err
    assert "status               finished" in out
    assert "shapes_of_mine.py is sent although .gitignore leaves it out, since the job needs it" in err
    result = json.loads((project.parent / "runs" / "submitted" / "result.json").read_text())
    assert result["status"] == "finished"
    assert TOKEN not in out + err


@pytest.mark.slow
def test_plain_ray_job_submit(head: Head, project: Path) -> None:
    (project / ".gitignore").unlink()
    command = ["ray", "job", "submit", "--address", head.url, "--working-dir", ".", "--runtime-env-json"]
    command += [json.dumps({"env_vars": {"FOR_THE_TASK": "it came through"}}), "--"]
    command += ["python", "-m", "raytrain_app", "run", "job.yaml"]
    done = subprocess.run(command, cwd=project, env=head.environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project.parent / "runs" / "submitted" / "result.json").exists()


@pytest.mark.slow
def test_a_folder_of_the_job_is_good_enough_for_one_node(head: Head, project: Path) -> None:
    options = ["--set", "storage=runs", "--set", "task=synthetic"]
    command = ["ray", "job", "submit", "--address", head.url, "--working-dir", ".", "--"]
    command += ["python", "-m", "raytrain_app", "run", "job.yaml", *options]
    done = subprocess.run(command, cwd=project, env=head.environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "storage: found runs, which is inside the folder that Ray made for this job" in done.stdout


def test_refusals_come_before_anything_is_sent(head: Head, project: Path) -> None:
    submit = ("submit", "job.yaml", "--address", head.url)
    code, _, err = outcome(head, project, *submit, "--env", "NOT_SET_ANYWHERE")
    assert (code, err.strip()) == (2, "--env: NOT_SET_ANYWHERE is not set here; set it, or leave the option out")
    code, _, err = outcome(head, project, *submit, "--set", "storage=runs")
    assert code == 2
    assert "storage: found runs, which on the cluster is a folder that is deleted with the job" in err
    code, _, err = outcome(head, project, *submit, RAY_AUTH_TOKEN_PATH="", RAY_AUTH_TOKEN="fedcba9876543210fedcba9876543210")
    assert code == 2
    assert re.search(r"refuses: it does not know the token that was sent; put the cluster's token .* into ~/.ray/auth_token", err)
    assert "fedcba98" not in err


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_run(head: Head, project: Path) -> None:
    # The variable is not passed on, so the task's own code fails on the workers.
    code, out, _ = outcome(head, project, "submit", "job.yaml", "--address", head.url)
    assert code == 4, out
    assert "KeyError: 'FOR_THE_TASK'" in out


@pytest.mark.slow
def test_a_stopped_job_writes_its_checkpoint_and_leaves_nobody(head: Head, project: Path) -> None:
    write_job(project, epochs=10_000)
    arguments = ("submit", "job.yaml", "--address", head.url, "--env", "FOR_THE_TASK", "--no-wait")
    code, out, err = outcome(head, project, *arguments)
    assert code == 0, err
    job_id = out.strip()
    run = project.parent / "runs" / "submitted"
    wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0, 120)
    assert ours(head)
    subprocess.run(["ray", "job", "stop", job_id, "--address", head.url], env=head.environment, check=True, capture_output=True)
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "stopped"
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{result['steps']:08d}"
    wait_for(lambda: not ours(head), 30)


@pytest.mark.slow
def test_a_lost_driver_is_replaced_and_the_run_goes_on(head: Head, project: Path) -> None:
    write_job(project, epochs=60)
    arguments = ("submit", "job.yaml", "--address", head.url, "--env", "FOR_THE_TASK", "--retries", "1")
    with raytrain(head, project, *arguments) as process:
        checkpoints = project.parent / "runs" / "submitted" / "checkpoints"
        wait_for(lambda: (checkpoints / "latest").exists(), 120)
        driver = driver_of("working_dir_files")
        assert driver is not None
        os.kill(driver.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=280)
    assert process.returncode == 0, out + err
    assert "the job's driver did not end by itself" in err
    assert err.count("submitted as submitted-") == 2
    events = (project.parent / "runs" / "submitted" / "events.jsonl").read_text()
    assert '"resume"' in events
