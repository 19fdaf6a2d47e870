"""Runs a job and does things to it at given steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray

from raytrain_app import runner
from raytrain_app.job import Job, job_from_dict
from raytrain_app.report.updates import Update
from raytrain_app.storage.audit import audit_run
from raytrain_app.storage.folder import Folder


def slow_job(storage: Path, name: str, *, workers: int | str = 2, **changes: Any) -> Job:
    """18 steps an epoch, of about 20 ms with two workers."""
    return job_from_dict(
        {
            "name": name,
            "task": "tests.integration.elastic.slow_task:SLOW",
            "model": {"name": "mlp", "dropout": 0.2, "batch_norm": True},
            "train": {"epochs": 15, "global_batch_size": 50, "virtual_shards": 4},
            "scaling": {"workers": workers},
            "failure": {"heartbeat_s": 3},
            "storage": str(storage),
            "audit": True,
            **changes,
        }
    )


Action = Callable[["Disturbed"], None]


class Disturbed:
    """A run with actions; each action gets this object and runs in a thread, so that the driver goes on.

    Args:
        job: what to run.
        actions: by the step after which they happen.
        on_event: by (kind, how many of that kind there were), such as ("join", 3).

    Attributes:
        pids: process ids of the workers that have joined and are not known to be lost, by worker id.
        events: all events so far.
        notes: what the run had to say besides.
    """

    def __init__(
        self, job: Job, actions: dict[int, Action] | None = None, on_event: dict[tuple[str, int], Action] | None = None
    ) -> None:
        self.job, self._actions, self._on_event = job, dict(actions or {}), dict(on_event or {})
        self.pids: dict[str, int] = {}
        self.events: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._threads: list[threading.Thread] = []

    @property
    def folder(self) -> Folder:
        """The run directory."""
        return Folder.open(self.job.storage).child(self.job.name)

    def run(self, **options: Any) -> dict[str, Any]:
        """Runs to the end and returns result.json."""
        try:
            return runner.run(self.job, on_update=self._watch, **options).record
        finally:
            for thread in self._threads:
                thread.join()

    def kill(self, *worker_ids: str, number: int = signal.SIGKILL) -> None:
        """Signals workers; those that are gone already are left out."""
        for worker_id in worker_ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[worker_id], number)

    def seen(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [event for event in self.events if event["kind"] == kind]

    def _watch(self, update: Update) -> None:
        if update.kind == "event":
            event = dict(update.record)
            self.events.append(event)
            if event["kind"] == "join":
                self.pids[event["worker"]] = event["pid"]
            elif event["kind"] in ("worker_lost", "node_lost"):
                self.pids.pop(event["worker"], None)
            self._do(self._on_event.pop((event["kind"], len(self.seen(event["kind"]))), None))
        elif update.kind == "note":
            self.notes.append(update.text)
        elif update.kind == "step":
            for step in [step for step in self._actions if update.record["step"] >= step]:
                self._do(self._actions.pop(step))

    def _do(self, action: Action | None) -> None:
        if action is not None:
            thread = threading.Thread(target=action, args=(self,))
            thread.start()
            self._threads.append(thread)


def kill_actor(name: str) -> None:
    """Kills the processes of this session's actors of a class, found by the title that Ray gives them."""
    found = list(_processes(f"ray::{name}"))
    assert found, f"no process of actor {name}"
    for process in found:
        process.kill()


def _processes(title: str) -> Iterator[psutil.Process]:
    session = ray.get_runtime_context().gcs_address.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline", "pid"]):
        command = " ".join(process.info["cmdline"] or ())
        if command.startswith(title) and _belongs_to(process, session):
            yield process


def _belongs_to(process: psutil.Process, gcs_port: str) -> bool:
    """Whether the process is of the Ray whose control service listens on that port."""
    try:
        parent = process.parent()
        return parent is not None and f":{gcs_port}" in " ".join(parent.cmdline())
    except psutil.NoSuchProcess:
        return False


def assert_undisturbed(disturbed: Disturbed, record: dict[str, Any], calm: dict[str, Any]) -> None:
    """The last word of every test: equal bits, equal metrics, each row exactly once an epoch."""
    assert record["status"] == "finished"
    assert record["weights_sha256"] == calm["weights_sha256"]
    for name in ("steps", "samples", "train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy"):
        assert record[name] == calm[name], name
    epochs = audit_run(disturbed.folder)
    assert len(epochs) == record["epochs"]
    assert all(epoch.exact and epoch.complete for epoch in epochs), [epoch.sentence() for epoch in epochs]
