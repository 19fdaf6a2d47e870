"""Two runs on one cluster: each takes what the other leaves, and what the other gives back."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from raytrain_app.cluster.local import LocalNodes
from raytrain_app.job import Job
from raytrain_app.storage.rundir import RunDirectory
from tests.integration.elastic.disturbed import slow_job


def raytrain(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "raytrain_app", *arguments]


class Run:
    """A run in a process of its own."""

    def __init__(self, job: Job, process: subprocess.Popen[bytes], log: Path) -> None:
        self._job, self.process, self._log = job, process, log

    def events(self, kind: str) -> list[dict[str, Any]]:
        folder = Path(self._job.storage, self._job.name)
        found = RunDirectory.open(str(folder)).read_events() if (folder / "events.jsonl").exists() else []
        return [event for event in found if event["kind"] == kind]

    def wait_for(self, workers: int) -> None:
        """Until its newest generation has so many."""
        end_s = time.monotonic() + 120.0
        while not (generations := self.events("generation")) or generations[-1]["workers"] != workers:
            assert time.monotonic() < end_s, self.said()
            assert self.process.poll() is None, self.said()
            time.sleep(0.1)

    def said(self) -> str:
        return self._log.read_text()


@contextmanager
def running(job: Job, address: str, folder: Path, repository: Path) -> Iterator[Run]:
    file, log = folder / f"{job.name}.yaml", folder / f"{job.name}.log"
    file.write_text(job.to_yaml())
    command = raytrain("run", str(file), "--address", address)
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=repository, stdout=output, stderr=output)
    try:
        yield Run(job, process, log)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_each_takes_what_the_other_leaves(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # for nodes and runs alike, whatever an earlier test has left
    train = {"epochs": 400, "global_batch_size": 50, "virtual_shards": 4}
    first = slow_job(tmp_path, "first", workers=1, train=train)
    second = slow_job(tmp_path, "second", workers="1..2", train=train)
    third = slow_job(tmp_path, "third", workers=1, train=train)

    def stop(run: str) -> None:
        subprocess.run(raytrain("stop", run, "--storage", str(tmp_path)), cwd=repository, check=True)

    third = third.model_copy(update={"scaling": third.scaling.model_copy(update={"wait_s": 2.0})})
    with LocalNodes(2, {"CPU": 1}) as nodes, ExitStack() as runs:
        one = runs.enter_context(running(first, nodes.address, tmp_path, repository))
        one.wait_for(workers=1)
        other = runs.enter_context(running(second, nodes.address, tmp_path, repository))
        other.wait_for(workers=1)
        assert other.events("join")[0]["node"] != one.events("join")[0]["node"]
        refused = runs.enter_context(running(third, nodes.address, tmp_path, repository))
        assert refused.process.wait(120) == 3
        assert "3 nodes with {CPU: 0} in all, which is what others on the cluster leave" in refused.said()
        stop("first")
        other.wait_for(workers=2)
        stop("second")
        assert other.process.wait(120) == 130
