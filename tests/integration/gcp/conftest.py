"""A Google Cloud project in a box: the shipped cluster.yaml, a real `ray up`, and machines that can be taken away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import pytest
import yaml

from tests.integration.gcp.emulator import PROJECT, Emulator
from tests.integration.gcp.machines import USER, Network, lacking
from tests.integration.storage.gcs import serve_bucket

REDIRECT = Path(__file__).parent / "redirect"
# All that differs from the shipped file. The image needs no line of its own: the box has one image, whatever is asked for.
REPLACED = {("provider", "project_id"): PROJECT, ("setup_commands",): ["mkdir -p ~/raytrain/env"]}


class Box:
    """The project, the cluster file for it, and the programs that a user has."""

    def __init__(self, emulator: Emulator, folder: Path, repository: Path, bucket: str) -> None:
        self.emulator, self.bucket = emulator, bucket
        self._folder, self._repository = folder, repository
        self._outputs: dict[int, TextIO] = {}
        self.cluster_file = folder / "cluster.yaml"
        self.cluster_file.write_text(_cluster_file(repository))
        home = folder / "home"
        (home / ".ray").mkdir(parents=True)
        self.environment = {
            **os.environ,
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{REDIRECT}:{repository}",
            "GCE_EMULATOR": emulator.host,
        }
        self.run("ray", "get-auth-token", "--generate")

    def run(self, *command: str, timeout: float = 280) -> str:
        """What a command prints; it must succeed."""
        done = subprocess.run(
            command,
            cwd=self._repository,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout + done.stderr

    @contextmanager
    def running(self, *command: str, cwd: Path | None = None, **variables: str) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on meanwhile; it and all that it started end with the block."""
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=cwd or self._repository,
                env={**self.environment, **variables},
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            self._outputs[process.pid] = output
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def output(self, process: subprocess.Popen[str]) -> str:
        """What a command has said so far."""
        output = self._outputs[process.pid]
        output.seek(0)
        return output.read()

    def logs(self) -> str:
        """The autoscaler's last lines, for the message of a failed test."""
        texts = []
        for log in self._folder.glob("machines/*head*/ray/session_2*/logs/monitor.*"):
            with suppress(OSError):
                texts.append(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        return "\n".join(texts)


def _cluster_file(repository: Path) -> str:
    data = yaml.safe_load((repository / "cluster.yaml").read_text())
    for keys, value in REPLACED.items():
        place = data
        for key in keys[:-1]:
            place = place[key]
        assert keys[-1] in place
        place[keys[-1]] = value
    return yaml.safe_dump(data, sort_keys=False)


def wait_for(condition: Callable[[], object], seconds: float = 120.0, message: Callable[[], str] = str) -> None:
    """Waits until the condition holds."""
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, f"it did not happen within {seconds:g} s\n{message()}"
        time.sleep(0.2)


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    reason = lacking() or ("googleapiclient is not installed: pip install '.[gcp]'" if not find_spec("googleapiclient") else "")
    if reason:
        pytest.skip(f"a project in a box cannot be had here: {reason}")
    folder = tmp_path_factory.mktemp("box")
    network = Network(os.getpid() % 200)
    try:
        with serve_bucket(network.gateway) as host:
            machines = folder / "machines"
            machines.mkdir()
            # What `ray up` copied to a machine is what runs there.
            emulator = Emulator(network, machines, {"PYTHONPATH": f"{REDIRECT}:/home/{USER}/raytrain"})
            try:
                repository = Path(__file__).parents[3]
                yield Box(emulator, folder, repository, f"gs://bucket/runs?endpoint_override={host}&scheme=http")
            finally:
                emulator.close()
    finally:
        network.close()
