"""One look at a run, laid out for a terminal of any size."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raytrain_app.report.curves import Curve, plot
from raytrain_app.report.happenings import STYLES
from raytrain_app.report.state import RunState
from raytrain_app.report.summary import PRESENT, Member
from raytrain_app.report.words import counted, duration

Line = tuple[np.ndarray, np.ndarray]
"""x and y of a curve."""

MOST_EVENTS, MOST_MEMBERS = 6, 12
TRAIN, VALIDATION = "blue", "dark_orange"
LEAST_CURVE, MOST_CURVE = 4, 14
"""Lines that a curve may have."""
STATUS_STYLES = {
    "finished": "green",
    "early_stopped": "green",
    "running": "blue",
    "starting": "blue",
    "replay": "magenta",
    "stopping": "yellow",
    "stopped": "yellow",
    "silent": "yellow",
    "failed": "red",
}
MEMBER_STYLES = {"training": "green", "waiting": "yellow", "parked": "dim", "left": "dim", "lost": "red"}
SHOWN_AT_THE_TOP = ("loss", "accuracy", "val_loss", "val_accuracy", "train_loss", "test_loss", "test_accuracy")


@dataclass
class View:
    """All that a screen shows.

    Attributes:
        state: where the run stands.
        train, validation: the lines of "loss" and "accuracy".
        events: time, kind and sentence, the newest last.
        seconds: that the run has been running.
        paces: steps a second of each worker, by its id.
    """

    state: RunState
    train: dict[str, Line]
    validation: dict[str, Line]
    events: Sequence[tuple[float, str, str]]
    seconds: float
    paces: dict[str, float] = field(default_factory=dict)


def screen(view: View, width: int, height: int) -> RenderableType:
    """Lays a view out for a terminal of this many characters and lines."""
    members = _members(view.state.members)
    events = list(view.events)[-MOST_EVENTS:]
    parts: list[RenderableType] = [_head(view, width), _progress(view.state, width), _numbers(view.state)]
    if view.state.servers is not None and not view.state.ended:
        parts.append(_servers(view.state.servers))
    taken = len(parts) + 2 + (len(members) + 2 if members else 0) + (len(events) + 2 if events else 0)
    lines = min(MOST_CURVE, height - taken - 3)
    if lines >= LEAST_CURVE:
        parts.append(Padding(_curves(view, width, lines), (1, 0, 0, 0)))
    if members:
        parts.append(Padding(_workers(view, members), (1, 0, 0, 0)))
    if events:
        parts.append(Padding(_events(events, width), (1, 0, 0, 0)))
    return Group(*parts)


def _head(view: View, width: int) -> RenderableType:
    state = view.state
    status = state.status.replace("_", " ")
    left = Text.assemble(
        (f" {state.name} ", "bold"), (f" {status} ", f"reverse {STATUS_STYLES.get(state.status, '')}"), no_wrap=True
    )
    limits = "..".join(map(str, dict.fromkeys(state.limits)))
    right = Text(f"{state.workers} of {limits} workers  {duration(view.seconds)} ", "dim", no_wrap=True)
    grid = Table.grid(expand=True)
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_row(left, right)
    return grid


def _progress(state: RunState, width: int) -> RenderableType:
    epoch = f" epoch {state.epoch}/{state.epochs}  step {state.step:,}"
    total = state.total_steps or 0
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(ratio=1)
    grid.add_column(justify="right")
    to_go = f"{duration(state.eta_s)} to go " if state.eta_s is not None else ""
    share = f"{100 * state.step // total} %  " if total else ""
    bar = ProgressBar(total=max(total, 1), completed=state.step, complete_style=TRAIN, finished_style="green")
    grid.add_row(epoch + (f"/{total:,}" if total else ""), bar, share + to_go)
    return grid


def _numbers(state: RunState) -> Text:
    text = Text(" ", no_wrap=True, overflow="ellipsis")
    for name in SHOWN_AT_THE_TOP:
        if name in state.metrics and not (name == "train_loss" and "loss" in state.metrics):
            text.append(f"{name.replace('accuracy', 'acc')} ", "dim")
            text.append(f"{state.metrics[name]:.4f}  ")
    if state.samples_per_s is not None:
        text.append(f"{state.samples_per_s:,.0f} ")
        text.append("samples/s  ", "dim")
    if state.tokens_per_s is not None:
        text.append(f"{state.tokens_per_s:,.0f} ")
        text.append("tokens/s  ", "dim")
    if state.checkpoint is not None:
        text.append("checkpoint ", "dim")
        text.append(f"{state.checkpoint:,}  ")
    for name, value in state.metrics.items():
        if name not in SHOWN_AT_THE_TOP:
            text.append(f"{name} ", "dim")
            text.append(f"{value:.4g}  ")
    return text


def _servers(line: Mapping[str, Any]) -> Text:
    """The parameter servers: how many, how fast, and by how many updates gradients came too late."""
    text = Text(" ", no_wrap=True, overflow="ellipsis")
    numbers = {
        "servers": f"{line['servers']}",
        "gradients/s": f"{line['rounds_per_s']:,.0f}",
        "staleness median": f"{line['staleness_median']}",
        "95 %": f"{line['staleness_p95']}",
        "most": f"{line['staleness_max']}",
        "refused": f"{line['refused']:,}",
        "lost": f"{line['lost']:,}",
        "MB/s in": f"{line['in_bytes_per_s'] / 1e6:,.1f}",
        "out": f"{line['out_bytes_per_s'] / 1e6:,.1f}",
    }
    for name, number in numbers.items():
        text.append(f"{name} ", "dim")
        text.append(f"{number}  ")
    return text


def _curves(view: View, width: int, lines: int) -> RenderableType:
    each = (width - 4) // 2
    grid = Table.grid(padding=(0, 2, 0, 1))
    titles, plots = [], []
    for name in ("loss", "accuracy"):
        train, validation = view.train[name], view.validation[name]
        values = np.concatenate([train[1], validation[1]])
        values = values[np.isfinite(values)]
        log = name == "loss" and len(values) > 0 and values.min() > 0 and values.max() > 15 * values.min()
        title = Text.assemble((f" {name}  ", "bold"))
        title.append("training", TRAIN)
        if np.isfinite(validation[1]).any():
            title.append("  validation", VALIDATION)
        titles.append(title)
        plots.append(plot([Curve(*train, TRAIN), Curve(*validation, VALIDATION)], each, lines, log=log))
    grid.add_row(*titles)
    grid.add_row(*plots)
    return grid


def _members(members: Sequence[Member]) -> list[Member]:
    """Those that are there, then those that are not, the newest first."""
    there = [member for member in members if member.state in PRESENT]
    gone = [member for member in members if member.state not in PRESENT]
    return (there + sorted(gone, key=lambda member: -member.since))[:MOST_MEMBERS]


def _workers(view: View, members: Sequence[Member]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name, justify in (("node", "left"), ("pool", "right"), ("worker", "left"), ("pid", "right"), ("state", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("steps/s", justify="right")
    for member in members:
        pace = view.paces.get(member.worker)
        table.add_row(
            member.node[:8],
            str(member.pool),
            member.worker,
            str(member.pid),
            Text(member.state, MEMBER_STYLES.get(member.state, "")),
            "" if pace is None else f"{pace:.1f}",
        )
    left_out = len(view.state.members) - len(members)
    if left_out > 0:
        return Group(Padding(table, (0, 0, 0, 1)), Text(f" and {counted(left_out, 'worker')} more, all gone", "dim"))
    return Padding(table, (0, 0, 0, 1))


def _events(events: Sequence[tuple[float, str, str]], width: int) -> RenderableType:
    lines = [
        Text.assemble((f" {time.strftime('%H:%M:%S', time.localtime(at))} ", "dim"), (text, STYLES.get(kind, "")))
        for at, kind, text in events
    ]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def lines_of(views: Iterator[View], every_s: float) -> Iterator[str]:
    """A run as plain lines, for logs and pipes: one every few seconds and one for each event."""
    told, last_s = 0.0, float("-inf")
    for view in views:
        for at, _, text in view.events:
            if at > told:
                told = at
                yield f"{time.strftime('%H:%M:%S', time.localtime(at))}  {text}"
        if time.monotonic() - last_s >= every_s or view.state.ended:
            last_s = time.monotonic()
            yield f"{view.state.status}  {_progress_text(view.state)}  {_numbers(view.state).plain.strip()}"


def _progress_text(state: RunState) -> str:
    total = f"/{state.total_steps:,}" if state.total_steps else ""
    return f"epoch {state.epoch}/{state.epochs}  step {state.step:,}{total}  {counted(state.workers, 'worker')}"
