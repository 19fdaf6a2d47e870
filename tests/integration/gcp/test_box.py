"""`ray up` of the shipped cluster file, jobs on machines that come and go, `ray down`: nothing of Ray is replaced."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raytrain_app.errors import StorageError
from raytrain_app.storage.rundir import RunDirectory
from tests.integration.gcp.conftest import Box, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROJECT_FOLDER = Path(__file__).parent / "project"
JOB: dict[str, Any] = {
    "name": "elastic",
    "task": "paced:TASK",
    "model": {"name": "cnn"},
    "data": {"source": "mnist-sample"},
    "train": {"epochs": 1, "global_batch_size": 64, "virtual_shards": 3, "seed": 0},
    "optimizer": {"name": "adam", "lr": 0.002},
    # A whole machine for each worker, so that three workers need three machines.
    "scaling": {"workers": "1..3", "resources_per_worker": {"CPU": 4}},
    "checkpoint": {"every_steps": 20},
    "failure": {"heartbeat_s": 10},
    "audit": True,
    "tensorboard": False,
}


class Run:
    """A submitted job and what it has left in the bucket so far.

    Args:
        box: that it runs in.
        process: the `raytrain submit` that follows it.
        name: of the run.
        slow: file that keeps the run slow while it is there.
    """

    def __init__(self, box: Box, process: subprocess.Popen[str], name: str, slow: Path) -> None:
        self._box, self.process, self._name, self._slow = box, process, name, slow

    @property
    def uri(self) -> str:
        """As this process reads it, which has no account."""
        place, _, options = self._box.bucket.partition("?")
        return f"{place.replace('gs://', 'gs://anonymous@')}/{self._name}?{options}"

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        with contextlib.suppress(StorageError):
            return [event for event in RunDirectory.open(self.uri).read_events() if event["kind"] in kinds]
        return []

    def workers(self) -> int:
        """Workers of the newest generation."""
        return max([(event["generation"], event["workers"]) for event in self.events("generation")], default=(0, 0))[1]

    def hosts(self) -> list[str]:
        """Addresses of the machines that its workers were on, the newest last."""
        return [event["host"] for event in self.events("join")]

    def wait_for(self, condition: Callable[[], object], seconds: float = 240.0) -> None:
        def check() -> bool:
            if self.process.poll() is not None and not condition():
                raise AssertionError(f"the job has ended: {self.output()}")
            return bool(condition())

        wait_for(check, seconds, lambda: f"{self.events()}\n{self._box.output(self.process)}\n{self._box.logs()}")

    def hurry(self) -> None:
        """Lets the run go at its own speed from now on."""
        self._slow.unlink(missing_ok=True)

    def said(self) -> str:
        """What the job said so far."""
        return self._box.output(self.process)

    def output(self) -> str:
        """All that the job said, once it has ended."""
        self.process.wait(280)
        return self._box.output(self.process)

    def finish(self) -> dict[str, Any]:
        """The result of a run that ends well, with an exact ledger."""
        self.hurry()
        output = self.output()
        assert self.process.returncode == 0, output
        result = RunDirectory.open(self.uri).read_result()
        assert result is not None
        assert result["status"] == "finished"
        self._box.run("raytrain", "audit", self.uri)
        return result


class Cluster:
    """The shipped cluster, reached as a user does.

    Args:
        box: that it lives in.
    """

    def __init__(self, box: Box) -> None:
        self._box, self._tunnel = box, contextlib.ExitStack()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def up(self) -> None:
        self._tunnel.close()
        self._box.run("ray", "up", "--yes", "--no-config-cache", str(self._box.cluster_file))
        # A user starts it again too when it has ended, since the head was not quite up.
        tunnel = f"while true; do ray dashboard --port {self._port} {self._box.cluster_file}; sleep 1; done"
        self._tunnel.enter_context(self._box.running("sh", "-c", tunnel))
        wait_for(self._reachable, 60)

    def down(self) -> None:
        self._tunnel.close()
        self._box.run("ray", "down", "--yes", str(self._box.cluster_file))

    @contextmanager
    def submitted(self, folder: Path, job: dict[str, Any], *options: str) -> Iterator[Run]:
        """A job sent with `raytrain submit`, which goes on meanwhile."""
        project, slow = folder / "project", folder / "slow"
        shutil.copytree(PROJECT_FOLDER, project, dirs_exist_ok=True)
        (project / "job.yaml").write_text(json.dumps({**job, "storage": self._box.bucket}))
        slow.touch()
        command = ["raytrain", "submit", "job.yaml", "--address", self.url, "--env", "SLOW_WHILE", *options]
        with self._box.running(*command, cwd=project, SLOW_WHILE=str(slow)) as process:
            try:
                yield Run(self._box, process, job["name"], slow)
            finally:
                slow.unlink(missing_ok=True)  # whatever is left of it ends soon

    def _reachable(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            return True
        return False


@contextmanager
def refused_storage(box: Box, cluster: Cluster, folder: Path) -> Iterator[None]:
    """A job, sent as Ray's users do, with storage that only the head sees; it has been refused when the block ends."""
    shutil.copytree(PROJECT_FOLDER, folder, dirs_exist_ok=True)
    (folder / "job.yaml").write_text(json.dumps({**JOB, "task": "mnist", "storage": "runs"}))
    command = ["ray", "job", "submit", "--address", cluster.url, "--working-dir", ".", "--"]
    command += ["python", "-m", "raytrain_app", "run", "job.yaml"]
    with box.running(*command, cwd=folder, RAY_AUTH_MODE="token") as process:
        yield
        process.wait(100)
        output = box.output(process)
    assert process.returncode != 0
    assert "workers on other nodes do not see it" in output
    assert "--set storage=" in output


@pytest.fixture(scope="module")
def cluster(box: Box) -> Iterator[Cluster]:
    box.run("raytrain", "cluster", "check", str(box.cluster_file))
    cluster = Cluster(box)
    cluster.up()
    yield cluster
    cluster.down()
    wait_for(lambda: not box.emulator.instances)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Future[str]]]:
    """Finds the hash of a job's weights on this machine alone, with the built-in task, while machines start elsewhere."""
    known: dict[str, Future[str]] = {}

    def run(text: str) -> str:
        folder = tmp_path_factory.mktemp("alone")
        (folder / "job.yaml").write_text(text)
        subprocess.run([sys.executable, "-m", "raytrain_app", "run", "job.yaml"], cwd=folder, check=True, capture_output=True)
        return str(json.loads((folder / "runs" / "alone" / "result.json").read_text())["weights_sha256"])

    with ThreadPoolExecutor(1) as aside:

        def alone(job: dict[str, Any]) -> Future[str]:
            job = {**job, "name": "alone", "task": "mnist", "audit": False, "scaling": {"workers": 1}, "storage": "runs"}
            text = json.dumps(job)
            if text not in known:
                known[text] = aside.submit(run, text)
            return known[text]

        yield alone


def test_a_run_on_spot_machines(box: Box, cluster: Cluster, tmp_path: Path, undisturbed: Callable[..., Future[str]]) -> None:
    """Machines come when the job asks; one is reclaimed with notice, one vanishes; the weights are as if nothing had been."""
    expected = undisturbed(JOB)
    with cluster.submitted(tmp_path, JOB) as run:
        run.wait_for(lambda: run.workers() == 3)
        first, second, *_ = box.emulator.named("cpu")
        box.emulator.reclaim(first)
        run.wait_for(lambda: run.events("leave"))
        box.emulator.lose(second)  # before there is another machine for the first one
        run.wait_for(lambda: run.events("worker_lost", "node_lost"))
        result = run.finish()
        # It did not take `failure.heartbeat_s` to see that the machine is gone.
        assert [(event["kind"], event["cause"]) for event in run.events("worker_lost", "node_lost")] == [("node_lost", "died")]
        receipts = [event["receipt"] for event in run.events("disruption")]
        assert [receipt for receipt in receipts if min(receipt["worker_seconds"].values()) < 0] == []
        assert RunDirectory.open(run.uri).checkpoints.exists("latest")
    assert result["weights_sha256"] == expected.result()


def test_two_runs_at_once_lose_a_machine_each(
    box: Box, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, undisturbed: Callable[..., Future[str]]
) -> None:
    """Parameter servers and Keras: each run gets machines of its own, and goes on without the one that vanishes."""
    job = {**JOB, "scaling": {"workers": "1..2", "resources_per_worker": {"CPU": 4}}}
    # Long enough to be under way still when Keras, which takes longer to import, has both of its workers.
    long = {**JOB["train"], "epochs": 2}
    servers = {**job, "name": "servers", "model": {"name": "linear"}, "strategy": {"name": "parameter_server"}, "train": long}
    keras = {**job, "name": "keras", "model": {"name": "mlp"}, "framework": "tensorflow"}
    expected = undisturbed(keras)
    with (
        cluster.submitted(tmp_path_factory.mktemp("keras"), keras) as one,
        cluster.submitted(tmp_path_factory.mktemp("servers"), servers) as other,
    ):
        one.wait_for(lambda: one.workers() == 2)
        other.wait_for(lambda: other.workers() == 2)
        assert not set(one.hosts()) & set(other.hosts())
        for run in (one, other):
            box.emulator.lose(box.emulator.at(run.hosts()[-1]))
        one.wait_for(lambda: one.events("node_lost"))
        other.wait_for(lambda: other.events("node_lost"))
        one.hurry()
        other.finish()
        result = one.finish()
    assert result["weights_sha256"] == expected.result()


def test_what_is_refused(box: Box, cluster: Cluster, tmp_path: Path) -> None:
    """Who waits for a machine is told why none comes; one that comes without its GPU's driver ends the run at once.

    Meanwhile, a job is refused whose storage workers do not see.
    """
    job = {**JOB, "name": "gpu", "scaling": {"workers": 1, "resources_per_worker": {"GPU": 1}}}
    box.emulator.outage = True
    refusal = {
        "code": "QUOTA_EXCEEDED",
        "message": "Quota 'NVIDIA_T4_GPUS' exceeded.  Limit: 0.0 in region us-west1.",
    }
    with cluster.submitted(tmp_path, job) as run:
        with refused_storage(box, cluster, tmp_path / "elsewhere"):
            run.wait_for(lambda: "the autoscaler has failed since" in run.said())
        box.emulator.refusal, box.emulator.outage = refusal, False
        run.wait_for(lambda: "Quota 'NVIDIA_T4_GPUS' exceeded" in run.said())
        box.emulator.refusal = {}
        output = run.output()
    assert "ask for a larger quota" in output
    assert "declares a GPU, and PyTorch sees none there" in output
    assert run.process.returncode == 3, output


def test_a_lost_head(box: Box, cluster: Cluster, tmp_path: Path, undisturbed: Callable[..., Future[str]]) -> None:
    """The run is lost with its driver; on the next head the same job goes on from the bucket."""
    job = {**JOB, "name": "headless", "checkpoint": {"every_steps": 3}}
    with cluster.submitted(tmp_path, job) as run:
        run.wait_for(lambda: run.events("checkpoint"))
        box.emulator.lose(box.emulator.named("head")[0])
        cluster.up()
        assert "its head was replaced; submit it with --resume to go on" in run.output()
        assert run.process.returncode == 5
    with cluster.submitted(tmp_path, job, "--resume") as run:
        run.wait_for(lambda: run.events("resume"))
        result = run.finish()
    assert run.events("resume")[0]["step"] > 0
    assert result["weights_sha256"] == undisturbed(JOB).result()
