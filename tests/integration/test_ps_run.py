"""Whole runs with parameter servers: under kills, while servers come and go, stopped and resumed."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from raytrain_app import runner
from raytrain_app.errors import Interrupted
from raytrain_app.job import Job, job_from_dict
from raytrain_app.report.updates import Update
from raytrain_app.storage.audit import audit_run
from raytrain_app.storage.requests import Request, Requests
from raytrain_app.storage.rundir import RunDirectory
from tests.integration.ps_tasks import TRAP
from tests.integration.replicas import Replicas


def make_job(storage: Path, name: str, **sections: Any) -> Job:
    raw = {
        "name": name,
        "task": "tests.integration.ps_tasks:TASK",
        "model": {"name": "linear"},
        "train": {"epochs": 3, "global_batch_size": 100, "virtual_shards": 4},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "strategy": {"name": "parameter_server"},
        "scaling": {"workers": 2},
        "checkpoint": {"every_steps": 20},
        "failure": {"max_restarts": 100},
        "storage": str(storage),
        "audit": True,
    }
    return job_from_dict({**raw, **sections})


class At:
    """Does things when the run has come to a step, each in a thread of its own."""

    def __init__(self, actions: dict[int, Callable[[], None]]) -> None:
        self.due = sorted(actions.items())

    def __call__(self, update: Update) -> None:
        while update.kind == "step" and self.due and update.record["step"] >= self.due[0][0]:
            threading.Thread(target=self.due.pop(0)[1], daemon=True).start()


def signal_one(directory: Path, kind: str, number: int = 0, what: int = signal.SIGKILL) -> Callable[[], None]:
    """Kills a worker or a server that status.json tells of, as soon as it does."""

    def act() -> None:
        while True:
            status = RunDirectory.open(str(directory)).read_status()
            members = status[f"{kind}s"] if status is not None else []
            members = [member for member in members if member.get("state", "active") == "active"]
            if len(members) > number:
                os.kill(members[number]["pid"], what)
                return
            time.sleep(0.05)

    return act


def together(*actions: Callable[[], None]) -> Callable[[], None]:
    def act() -> None:
        for action in actions:
            action()

    return act


def post(directory: Path, request: Request) -> Callable[[], None]:
    def act() -> None:
        Requests(RunDirectory.open(str(directory)).folder).post(request)

    return act


def scrape(pages: list[str]) -> None:
    """Keeps the pages of Ray's Prometheus endpoint that tell of servers, until they tell of their workers too."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    while not pages or "worker_age_s{" not in pages[-1]:
        time.sleep(0.5)
        with urllib.request.urlopen(url, timeout=10) as reply:
            page = reply.read().decode()
        if "ray_raytrain_server_pushes" in page:
            pages.append(page)


def tensorboard_events(directory: Path) -> list[Any]:
    loaders = [EventFileLoader(str(path)) for path in (directory / "tensorboard").iterdir()]
    return [event for loader in loaders for event in loader.Load()]


def assert_exact(directory: RunDirectory, epochs: int) -> None:
    """Each row once an epoch, and metrics that tell the same story."""
    audit = audit_run(directory.folder)
    assert len(audit) == epochs
    for epoch in audit:
        assert epoch.exact, epoch.sentence()
        assert epoch.complete
    lines = directory.read_metrics()
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == list(range(1, epochs + 1))
    assert [line["time"] for line in steps] == sorted(line["time"] for line in steps)
    assert steps[-1]["samples"] == sum(epoch.applied for epoch in audit)


@pytest.mark.timeout(120)
def test_a_lost_worker_and_a_lost_server_cost_no_row(tmp_path: Path, ray_local: None) -> None:
    train = {"epochs": 3, "global_batch_size": 100}
    job = make_job(tmp_path, "short", train=train, optimizer={"name": "adam", "lr": 0.005})
    directory = tmp_path / "short"
    actions = {20: signal_one(directory, "worker"), 60: signal_one(directory, "server")}
    result = runner.run(job, on_update=At(actions)).record
    assert (result["status"], result["steps"]) == ("finished", 216)
    assert result["test_accuracy"] >= 0.8
    found = RunDirectory.open(str(directory))
    assert_exact(found, epochs=3)
    kinds = [event["kind"] for event in found.read_events()]
    assert (kinds.count("worker_lost"), kinds.count("server_lost")) == (1, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bulk_under_kills_has_the_bits_of_the_synchronous_run(tmp_path: Path, ray_local: None, replicas: Replicas) -> None:
    bulk = {"name": "parameter_server", "sync": "bulk", "servers": 2}
    job = make_job(tmp_path, "bulk", strategy=bulk)
    directory = tmp_path / "bulk"
    actions = {
        20: signal_one(directory, "worker"),
        50: signal_one(directory, "server", 0),
        100: together(signal_one(directory, "worker"), signal_one(directory, "server", 1)),
        150: together(*(signal_one(directory, kind, number) for kind, number in (("worker", 0), ("server", 0), ("server", 1)))),
    }
    result = runner.run(job, on_update=At(actions)).record
    synchronous = job_from_dict({**job.model_dump(mode="json"), "strategy": {"name": "allreduce"}, "name": "sync"})
    calm = replicas.run(synchronous, 1, replicas.load(synchronous))
    assert {name: result[name] for name in calm.summary} == calm.summary
    found = RunDirectory.open(str(directory))
    assert_exact(found, epochs=3)
    events = found.read_events()
    kinds = [event["kind"] for event in events]
    assert kinds.count("worker_lost") == 3
    assert kinds.count("server_lost") == 4
    assert {receipt["cause"] for receipt in result["disruptions"]} >= {"worker_lost"}
    # What a worker and a server lost together is done again; the first worker and the first server died alone.
    assert result["steps_redone"] == sum(event["steps"] for event in events if event["kind"] == "roll_back")
    per_step = [(line["loss"], line["accuracy"]) for line in found.read_metrics() if line["kind"] == "step"]
    assert per_step == [(line["loss"], line["accuracy"]) for line in calm.metrics if line["kind"] == "step"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_servers_come_and_go_and_workers_too(tmp_path: Path, ray_local: None) -> None:
    hang, train = {"max_restarts": 100, "heartbeat_s": 4.0}, {"epochs": 12, "global_batch_size": 100}
    adam, three = {"name": "adam", "lr": 0.005}, {"workers": "1..3"}
    job = make_job(tmp_path, "free", train=train, optimizer=adam, scaling=three, failure=hang)
    directory = tmp_path / "free"
    at = At(
        {
            15: post(directory, Request(kind="servers", servers=2)),
            40: signal_one(directory, "worker"),
            60: signal_one(directory, "worker", 1, signal.SIGSTOP),
            90: post(directory, Request(kind="scale", least=1, most=1)),
        }
    )
    then = [
        post(directory, Request(kind="servers", servers=1)),
        post(directory, Request(kind="scale", least=1, most=3)),
    ]

    def on_update(update: Update) -> None:
        at(update)
        if update.kind == "event" and update.record["kind"] == "reshard":
            then.pop(0)()

    pages: list[str] = []
    threading.Thread(target=scrape, args=(pages,), daemon=True).start()
    result = runner.run(job, on_update=on_update).record
    assert result["status"] == "finished"
    assert result["test_accuracy"] >= 0.87
    found = RunDirectory.open(str(directory))
    assert_exact(found, epochs=12)
    events = found.read_events()
    assert [event["servers"] for event in events if event["kind"] == "reshard"] == [2, 1]
    assert {event["cause"] for event in events if event["kind"] == "worker_lost"} == {"died", "silent"}
    lines = [line for line in found.read_metrics() if line["kind"] == "servers"]
    assert lines
    assert {"staleness_counts", "gap", "refused", "waited", "ages", "rounds_per_s", "in_bytes_per_s"} <= set(lines[-1])
    seconds = result["worker_seconds"]
    assert seconds["useful"] > 0
    told = {value.tag for event in tensorboard_events(directory) for value in event.summary.value}
    assert {"servers/staleness", "servers/gap", "servers/rounds_per_s", "servers/refused", "servers/age_max_s"} <= told
    assert pages, "Ray's endpoint had nothing about servers"
    for name in ("pushes_total", "staleness_bucket", "gap", "worker_age_s", "in_bytes_total"):
        assert f"ray_raytrain_server_{name}{{" in pages[-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_lives_but_hangs_is_replaced(tmp_path: Path, ray_local: None) -> None:
    job = make_job(tmp_path, "stuck", failure={"heartbeat_s": 4.0}, train={"epochs": 1, "global_batch_size": 100})
    try:
        result = runner.run(job, on_update=At({20: TRAP.touch})).record
        assert not TRAP.exists()
    finally:
        TRAP.unlink(missing_ok=True)
    assert (result["status"], result["steps"]) == ("finished", 72)
    found = RunDirectory.open(str(tmp_path / "stuck"))
    assert_exact(found, epochs=1)
    assert [event["cause"] for event in found.read_events() if event["kind"] == "worker_lost"] == ["stuck"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stopped_and_resumed_with_other_servers(tmp_path: Path, ray_local: None) -> None:
    job = make_job(tmp_path, "again", strategy={"name": "parameter_server", "servers": 2})
    directory = tmp_path / "again"
    with pytest.raises(Interrupted):
        runner.run(job, on_update=At({90: post(directory, Request(kind="stop"))}))
    stopped = RunDirectory.open(str(directory)).read_result()
    assert stopped is not None
    assert stopped["status"] == "stopped"
    with (directory / "metrics.jsonl").open("a") as file:  # as if the driver had died some steps after the checkpoint
        file.write('{"kind": "step", "epoch": 2, "step": 999, "samples": 99900, "time": 0, "workers": 1}\n')
    more = job_from_dict({**job.model_dump(mode="json"), "strategy": {"name": "parameter_server", "servers": 3}})
    result = runner.run(more, resume=True).record
    assert result["status"] == "finished"
    assert result["steps"] == 216
    found = RunDirectory.open(str(directory))
    assert_exact(found, epochs=3)
    resumed = [event["step"] for event in found.read_events() if event["kind"] == "resume"]
    assert resumed == [stopped["steps"]]
    assert np.isfinite(result["val_loss"])
