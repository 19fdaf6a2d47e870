"""Where a run stands, read from its directory alone: for a run under way, one that ended, and one whose driver died.

`read_state` is one look; `Follower` keeps looking and reads only what is new.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raytrain_app.job import Job
from raytrain_app.report.summary import PRESENT, Member, Record, Summary
from raytrain_app.report.words import ago, duration
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.growing import GrowingFile
from raytrain_app.storage.rundir import EVENTS, METRICS, RunDirectory

SILENT_S, SILENT_WRITES = 15.0, 3
"""A run without a result is called silent when its driver has left out this many writes of status.json, and some seconds."""
TAIL_BYTES = 256 << 10
"""How much of the end of metrics.jsonl tells where a run stands and how fast it is."""
TOTALS = ("train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy")


@dataclass
class RunState:
    """Everything about a run that fits on a screen; `to_json` has the same names.

    Attributes:
        name: of the run.
        directory: URI of the run directory.
        status: "starting", "running", "stopping", "silent", or result.json's "finished", "early_stopped", "stopped", "failed".
        error: why it failed.
        epoch: the epoch under way, from 1; epochs: of the whole run.
        step: steps applied; total_steps: of the whole run, None while that is not known.
        samples: rows applied.
        metrics: the newest value of each metric by its name in metrics.jsonl or result.json.
        workers: training now; after the end, those that trained last. limits: workers it may have at least and at most.
        lack: why machines that it could use do not come; empty where that is not so.
        samples_per_s: now; after the end, on the whole. tokens_per_s: the same where rows are sequences.
        eta_s: seconds to go at this pace, None when it cannot be told.
        started, updated: when it began and was last heard of, seconds since 1970.
        members: workers that there were, the newest last.
        worker_seconds: lifetimes of all workers, added up by what they went into.
        disruptions: receipts.
        servers: the newest line about the parameter servers, where there are any.
        checkpoint: step of the newest checkpoint.
        result: the content of result.json, None while the run has not ended.
    """

    name: str
    directory: str
    task: str
    framework: str
    strategy: str
    epochs: int
    status: str = "starting"
    error: str | None = None
    epoch: int = 0
    step: int = 0
    total_steps: int | None = None
    samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    workers: int = 0
    limits: list[int] = field(default_factory=list)
    lack: str = ""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    started: float | None = None
    updated: float | None = None
    members: list[Member] = field(default_factory=list)
    worker_seconds: dict[str, float] = field(default_factory=dict)
    disruptions: list[dict[str, Any]] = field(default_factory=list)
    servers: dict[str, Any] | None = None
    checkpoint: int | None = None
    result: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        """Whether there is a result."""
        return self.result is not None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def read_state(folder: Folder, now: float | None = None) -> RunState:
    """Where a run stands.

    Args:
        folder: the run directory.
        now: seconds since 1970; None is the clock's.

    Raises:
        StorageError, JobError: there is no run, or something in its directory cannot be read.
    """
    follower = Follower(folder, tail_only=True)
    follower.look()
    return follower.state(now)


class Follower:
    """Follows a run by its files. On a disk only what was added is read; on an object store a file is read whole.

    Args:
        folder: the run directory.
        tail_only: leave out all but the end of metrics.jsonl.
        metrics_from: bytes of metrics.jsonl to leave out instead, since the caller knows them.
        seen: the last of the lines left out.
    """

    def __init__(self, folder: Folder, *, tail_only: bool = False, metrics_from: int = 0, seen: Sequence[Record] = ()) -> None:
        self._directory = RunDirectory(folder)
        self.job = self._directory.read_job()
        self._metrics = GrowingFile(folder, METRICS, metrics_from, TAIL_BYTES if tail_only else None)
        self._events = GrowingFile(folder, EVENTS)
        self._result: dict[str, Any] | None = None
        self._status: Record | None = None
        self._summary = Summary()
        self._summary.add(seen, ())

    def look(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Reads what is new; returns the new lines of metrics.jsonl and of events.jsonl."""
        # The result first: what was written before it is then read below.
        self._result, self._status = self._directory.read_result(), self._directory.read_status()
        metrics, events = self._metrics.read(), self._events.read()
        self._summary.add(metrics, events)
        return metrics, events

    def state(self, now: float | None = None) -> RunState:
        """Where the run stood at the last look."""
        state = summed_up(self.job, self._directory.uri, self._summary)
        if self._result is not None:
            _take_result(state, self._result)
        else:
            if self._status is not None:
                _take_status(state, self._status)
            _judge(state, self._status, time.time() if now is None else now, self._summary.rate("step"))
        return state


def summed_up(job: Job, directory: str, summary: Summary) -> RunState:
    """What the records alone say; `status` follows from more than them."""
    return RunState(
        name=job.name,
        directory=directory,
        task=job.task,
        framework=job.framework,
        strategy=job.strategy.name,
        epochs=job.train.epochs,
        epoch=min(summary.epoch, job.train.epochs),
        step=summary.step,
        total_steps=summary.total_steps(job.train.epochs),
        samples=summary.samples,
        metrics=dict(summary.metrics),
        workers=summary.workers,
        limits=[job.scaling.workers.min, job.scaling.workers.max],
        samples_per_s=summary.rate("samples"),
        tokens_per_s=summary.rate("tokens"),
        started=summary.started,
        updated=summary.updated,
        members=[replace(member) for member in summary.members.values()],
        disruptions=list(summary.disruptions),
        servers=dict(summary.servers) if summary.servers is not None else None,
        checkpoint=summary.checkpoint,
    )


def _take_result(state: RunState, result: Mapping[str, Any]) -> None:
    state.result = dict(result)
    state.status, state.error = result["status"], result.get("error")
    state.metrics.update({name: result[name] for name in TOTALS if result.get(name) is not None})
    state.samples_per_s, state.tokens_per_s = result.get("samples_per_s"), result.get("tokens_per_s")
    state.worker_seconds = dict(result.get("worker_seconds") or {})


def _take_status(state: RunState, status: Record) -> None:
    """What the driver itself knows of the workers outranks what follows from the events."""
    state.total_steps = status["total_steps"]
    state.limits = list(status["limits"])
    state.lack = status.get("lack", "")
    state.worker_seconds = dict(status["worker_seconds"])
    state.updated = max(state.updated or 0.0, status["time"])
    present = {worker["worker"]: worker for worker in status["workers"]}
    for member in state.members:
        if found := present.get(member.worker):
            member.state = "training" if found["state"] == "active" else found["state"]
            member.clock = found["clock"]


def _judge(state: RunState, status: Record | None, now: float, steps_per_s: float | None) -> None:
    """Whether a run without a result goes on, and for how long yet."""
    patience_s = SILENT_S + SILENT_WRITES * (status["every_s"] if status is not None else SILENT_S)
    if state.updated is not None and now - state.updated > patience_s:
        state.status = "silent"
        return
    state.status = "stopping" if status is not None and status["stopping"] else "running" if state.step else "starting"
    if state.total_steps is not None and steps_per_s:
        state.eta_s = max(0, state.total_steps - state.step) / steps_per_s


def state_lines(state: RunState) -> list[str]:
    """The state as an aligned table for the terminal, one row a line."""
    rows = list(_rows(state))
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {text}" for label, text in rows]


def _rows(state: RunState) -> Iterator[tuple[str, str]]:
    heard = "" if state.updated is None else f", last heard of {ago(time.time() - state.updated)} ago"
    advice = "; its driver may have died, and --resume goes on from the last checkpoint" if state.status == "silent" else ""
    yield "status", state.status.replace("_", " ") + ("" if state.ended else heard) + advice
    if state.error:
        yield "error", state.error
    yield "epoch", f"{state.epoch} of {state.epochs}"
    yield "step", f"{state.step:,}" + (f" of {state.total_steps:,}" if state.total_steps else "")
    if state.eta_s is not None:
        yield "to go", duration(state.eta_s)
    if state.samples_per_s is not None:
        tokens = "" if state.tokens_per_s is None else f", {state.tokens_per_s:,.0f} tokens"
        yield "speed", f"{state.samples_per_s:,.0f} samples{tokens} a second"
    for name, value in state.metrics.items():
        if name == "train_loss" and "loss" in state.metrics:
            continue  # the same number, after the last epoch
        yield name.replace("_", " "), f"{value:.4g}"
    if not state.ended:
        yield "workers", f"{state.workers} of {'..'.join(map(str, dict.fromkeys(state.limits)))}"
        for member in state.members:
            if member.state in PRESENT:
                yield "", f"{member.worker} on {member.node[:8]}, pid {member.pid}: {member.state}"
    if state.lack:
        yield "more workers", state.lack
    if state.servers is not None and not state.ended:
        yield "servers", _servers(state.servers)
    if state.disruptions:
        pause_s = sum(receipt["paused_s"] for receipt in state.disruptions)
        yield "disruptions", f"{len(state.disruptions)}, paused {duration(pause_s)} in all"
    if state.checkpoint is not None:
        yield "checkpoint", f"step {state.checkpoint:,}"
    yield "run directory", state.directory


def _servers(line: Mapping[str, Any]) -> str:
    """The newest line about the parameter servers, for people."""
    return (
        f"{line['servers']}, {line['rounds_per_s']:,.0f} gradients a second that missed {line['staleness_median']} (median) to "
        f"{line['staleness_max']} updates; {line['refused']:,} refused, {line['returned']:,} taken back, {line['lost']:,} lost"
    )
