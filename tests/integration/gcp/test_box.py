"""`ray up` of the shipped cluster file, jobs on machines that come and go, `ray down`: nothing of Ray is replaced."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raytrain_app.errors import StorageError
from raytrain_app.storage.rundir import RunDirectory
from tests.integration.gcp.conftest import Box, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JOB: dict[str, Any] = {
    "name": "elastic",
    "task": "mnist",
    "model": {"name": "cnn"},
    "data": {"source": "mnist-sample"},
    "train": {"epochs": 8, "global_batch_size": 64, "virtual_shards": 3, "seed": 0},
    "optimizer": {"name": "adam", "lr": 0.002},
    # A whole machine for each worker, so that three workers need three machines.
    "scaling": {"workers": "1..3", "resources_per_worker": {"CPU": 4}},
    "checkpoint": {"every_steps": 50},
    "failure": {"heartbeat_s": 10},
    "audit": True,
    "tensorboard": False,
}


class Run:
    """A submitted job and what it has left in the bucket so far."""

    def __init__(self, box: Box, process: subprocess.Popen[str], name: str) -> None:
        self._box, self.process, self._name = box, process, name

    @property
    def uri(self) -> str:
        """As this process reads it, which has no account."""
        place, _, options = self._box.bucket.partition("?")
        return f"{place.replace('gs://', 'gs://anonymous@')}/{self._name}?{options}"

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        with contextlib.suppress(StorageError):
            return [event for event in RunDirectory.open(self.uri).read_events() if event["kind"] in kinds]
        return []

    def steps(self) -> int:
        with contextlib.suppress(StorageError):
            return max([record["step"] for record in RunDirectory.open(self.uri).read_metrics()], default=0)
        return 0

    def wait_for(self, condition: Any, seconds: float = 180.0) -> None:
        def check() -> bool:
            if self.process.poll() is not None and not condition():
                raise AssertionError(f"the job has ended: {self.output()}")
            return bool(condition())

        wait_for(check, seconds, self._box.logs)

    def output(self) -> str:
        """All that the job said, once it has ended."""
        self.process.wait(280)
        return self._box.output(self.process)

    def result(self) -> dict[str, Any]:
        result = RunDirectory.open(self.uri).read_result()
        assert result is not None
        return result


@contextmanager
def cluster(box: Box) -> Iterator[str]:
    """The cluster, from `ray up` to `ray down`; the address of its job server, reached as a user does."""
    box.run("raytrain", "cluster", "check", str(box.cluster_file))
    box.run("ray", "up", "--yes", "--no-config-cache", str(box.cluster_file))
    try:
        with tunnel(box) as url:
            yield url
    finally:
        box.run("ray", "down", "--yes", str(box.cluster_file))
        wait_for(lambda: not box.emulator.instances)


@contextmanager
def tunnel(box: Box) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def open_() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    with box.running("ray", "dashboard", "--port", str(port), str(box.cluster_file)):
        wait_for(open_, 60)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def submitted(box: Box, url: str, folder: Path, job: dict[str, Any], *options: str) -> Iterator[Run]:
    """A job sent with `raytrain submit`, which goes on meanwhile."""
    folder.mkdir(exist_ok=True)
    (folder / "job.yaml").write_text(json.dumps({**job, "storage": box.bucket}))
    with box.running("raytrain", "submit", "job.yaml", "--address", url, *options, cwd=folder) as process:
        yield Run(box, process, job["name"])


def undisturbed(box: Box, folder: Path, job: dict[str, Any]) -> str:
    """The hash of the same job on this machine alone."""
    job = {**job, "storage": str(folder), "audit": False, "scaling": {"workers": 1}}
    (folder / "alone.yaml").write_text(json.dumps(job))
    subprocess.run([sys.executable, "-m", "raytrain_app", "run", "alone.yaml"], cwd=folder, check=True, capture_output=True)
    result = json.loads((folder / job["name"] / "result.json").read_text())
    return str(result["weights_sha256"])


def test_a_run_on_spot_machines(box: Box, tmp_path: Path) -> None:
    """Machines come when the job asks; one is reclaimed with notice, one vanishes; the weights are as if nothing had been."""
    with cluster(box) as url, submitted(box, url, tmp_path / "project", JOB) as run:
        run.wait_for(lambda: len(run.events("join")) >= 3)
        first, second, *_ = box.emulator.named("cpu")
        box.emulator.reclaim(first)
        run.wait_for(lambda: run.events("leave"))
        run.wait_for(lambda: len(run.events("join")) >= 4)
        box.emulator.lose(second)
        run.wait_for(lambda: run.events("worker_lost"))
        output = run.output()
        assert run.process.returncode == 0, output
        result = run.result()
        assert result["status"] == "finished"
        box.run("raytrain", "audit", run.uri)
    assert result["weights_sha256"] == undisturbed(box, tmp_path, JOB)
    assert RunDirectory.open(run.uri).checkpoints.exists("latest")
