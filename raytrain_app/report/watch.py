"""A run on a whole screen of the terminal: while it trains, and played back when it has ended. Read from its directory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live

from raytrain_app.report.happenings import sentence
from raytrain_app.report.history import Columns, History, RunClock, read_history, smooth
from raytrain_app.report.screen import Line, View, screen
from raytrain_app.report.state import Follower, RunState, summed_up
from raytrain_app.report.summary import Summary
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.rundir import RunDirectory

FRAMES_PER_S = 8
REMOTE_LOOK_S = 5.0
"""How often an object store is asked; a disk is asked before each frame."""
SEEN_STEPS = 200
"""Steps before a moment that tell the state in it."""
PACE_WINDOW_S = 5.0
"""Over how long a worker's pace is taken."""

Record = Mapping[str, Any]


def watch(folder: Folder, console: Console, replay_s: float = 8.0) -> RunState:
    """Shows a run until it ends, and returns how it ended. Ctrl-C ends the watching and not the run.

    Args:
        folder: the run directory.
        console: a terminal.
        replay_s: how long a run that has ended is played back; 0 shows its end at once.

    Raises:
        StorageError, JobError: there is no run, or something in its directory cannot be read.
    """
    last: View | None = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for view in views(folder, replay_s):
                last = view
                live.update(screen(view, console.width, console.height), refresh=True)
    finally:
        if last is not None:
            console.print(screen(last, console.width, min(console.height - 1, 32)))
    assert last is not None, "there is at least one view"
    return last.state


def views(folder: Folder, replay_s: float = 0.0) -> Iterator[View]:
    """What there is to see, as time goes on; the last one is the run's end."""
    history = read_history(RunDirectory(folder))
    follower = Follower(folder, metrics_from=history.size_bytes, seen=_records(history, slice(-SEEN_STEPS, None)))
    metrics, events = follower.look()
    if follower.state().ended and not metrics:
        yield from _replayed(follower, history, events, replay_s)
    else:
        yield from _followed(follower, history, metrics, events, 1 / FRAMES_PER_S if folder.local_path else REMOTE_LOOK_S)


# ---- a run under way ----


@dataclass
class Trace:
    """A line of bounded length that grows: when it is full, neighbours become their mean, and so does what comes after."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    group: int = 1
    limit: int = 4000
    _waiting: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> Trace:
        trace = cls()
        while len(x) // trace.group > trace.limit // 2:
            trace.group *= 2
        whole = len(x) // trace.group * trace.group
        trace.x, trace.y = ([*np.mean(v[:whole].reshape(-1, trace.group), axis=1).tolist()] for v in (x, y))
        return trace

    def add(self, x: float, y: float) -> None:
        self._waiting.append((x, y))
        if len(self._waiting) < self.group:
            return
        self.x.append(sum(x for x, _ in self._waiting) / self.group)
        self.y.append(sum(y for _, y in self._waiting) / self.group)
        self._waiting.clear()
        if len(self.x) >= self.limit:
            self.x, self.y = ([(a + b) / 2 for a, b in zip(v[::2], v[1::2], strict=False)] for v in (self.x, self.y))
            self.group *= 2

    def line(self) -> Line:
        return smooth(np.array(self.x), np.array(self.y), share=0.03)


def _followed(
    follower: Follower, history: History, metrics: Sequence[Record], events: Sequence[Record], every_s: float
) -> Iterator[View]:
    names = ("loss", "accuracy")
    train = {name: Trace.of(history.steps["step"], history.steps[name]) for name in names}
    validation = {name: Trace.of(history.epochs["step"], history.epochs[f"val_{name}"]) for name in names}
    told, paces = _sentences(events), _Paces()
    clock = RunClock.of(events, history.steps["time"][-1:])
    while True:
        for record in metrics:
            for name in names:
                if record["kind"] == "step":
                    train[name].add(record["step"], record[name])
                elif record.get(f"val_{name}") is not None:
                    validation[name].add(record["step"], record[f"val_{name}"])
        state = follower.state()
        running_s = clock.total_s + max(0.0, (state.updated or 0.0) - float(clock.ends[-1]))
        lines = {name: trace.line() for name, trace in train.items()}
        held_out = {name: (np.array(trace.x), np.array(trace.y)) for name, trace in validation.items()}
        yield View(state, lines, held_out, list(told), running_s, paces.of(state))
        if state.ended:
            return
        time.sleep(every_s)
        metrics, events = follower.look()
        told.extend(_sentences(events))


class _Paces:
    """Steps a second of each worker, from how its clock has moved."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def of(self, state: RunState) -> dict[str, float]:
        paces, now = {}, time.monotonic()
        for member in state.members:
            if member.clock is None or member.state != "training":
                continue
            seen = self._seen.setdefault(member.worker, deque())
            seen.append((now, member.clock))
            while len(seen) > 2 and seen[1][0] <= now - PACE_WINDOW_S:
                seen.popleft()
            if now - seen[0][0] > 1:
                paces[member.worker] = (member.clock - seen[0][1]) / (now - seen[0][0])
        return paces


# ---- a run that has ended ----


def _replayed(follower: Follower, history: History, events: Sequence[Record], replay_s: float) -> Iterator[View]:
    end, clock = follower.state(), RunClock.of(events, history.steps["time"])
    frames = int(replay_s * FRAMES_PER_S)
    step_seconds, epoch_seconds = clock.seconds(history.steps["time"]), clock.seconds(history.epochs["time"])
    event_seconds = clock.seconds([event["time"] for event in events])
    begin_s = float(step_seconds[0]) if len(step_seconds) else 0.0  # nobody wants to see Ray start again
    summary, fed = Summary(), 0
    for frame in range(frames):
        at = begin_s + (clock.total_s - begin_s) * (frame + 0.5) / frames
        steps, epochs = int(np.searchsorted(step_seconds, at)), int(np.searchsorted(epoch_seconds, at))
        upto = int(np.searchsorted(event_seconds, at))
        summary.add(_records(history, slice(max(0, steps - SEEN_STEPS), steps), epochs), events[fed:upto])
        fed = upto
        state = summed_up(follower.job, end.directory, summary)
        state.status, state.total_steps = "replay", end.total_steps or end.step
        yield _view(state, history, steps, epochs, events[:upto], at)
        time.sleep(1 / FRAMES_PER_S)
    yield _view(end, history, None, None, events, clock.total_s)


def _view(
    state: RunState, history: History, steps: int | None, epochs: int | None, events: Sequence[Record], seconds: float
) -> View:
    def train(name: str) -> Line:
        return smooth(history.steps["step"][:steps], history.steps[name][:steps], share=0.03)

    def validation(name: str) -> Line:
        return history.epochs["step"][:epochs], history.epochs[f"val_{name}"][:epochs]

    names = ("loss", "accuracy")
    told = list(_sentences(events))
    return View(state, {name: train(name) for name in names}, {name: validation(name) for name in names}, told, seconds)


# ---- small things ----


def _sentences(events: Sequence[Record]) -> deque[tuple[float, str, str]]:
    """Time, kind and sentence of the events that people want to hear of, the newest of them."""
    told = ((event["time"], str(event["kind"]), sentence(event)) for event in events)
    return deque((entry for entry in told if entry[2]), maxlen=50)


def _records(history: History, steps: slice, epochs: int | None = None) -> list[Record]:
    """Lines of metrics.jsonl again, from columns: some steps, and the last epoch of the first `epochs` ones."""
    records = [{"kind": "step", **_row(history.steps, place)} for place in range(history.num_steps)[steps]]
    ended = len(history.epochs["step"]) if epochs is None else epochs
    if ended:
        records.append({"kind": "epoch", **_row(history.epochs, ended - 1)})
    return sorted(records, key=lambda record: (record["step"], record["kind"] == "epoch"))


def _row(columns: Columns, place: int) -> dict[str, Any]:
    values = {name: column[place].item() for name, column in columns.items()}
    return {name: value for name, value in values.items() if value == value}  # NaN is what a line does not have
