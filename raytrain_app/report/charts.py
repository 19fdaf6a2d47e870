"""What the report's charts show, as plain values; `drawing` turns them into pictures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from raytrain_app.report.happenings import receipt_text
from raytrain_app.report.history import History, RunClock, smooth, thin, throughput

MOST_MARKS = 60
"""Disruptions that one chart can show; of those close to each other, the one with the longest pause is."""


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        label: its name; empty for one that only accompanies another.
        color: a role of `drawing.PALETTE`.
        x, y: the points, each of shape (n,).
        kind: "line"; "faint" for raw values behind a smoothed line; "dots" for few values that are joined; "steps" for counts
            that hold until the next; "area" for a filled line.
        width: of the line, in points.
    """

    label: str
    color: str
    x: np.ndarray
    y: np.ndarray
    kind: Literal["line", "faint", "dots", "steps", "area"] = "line"
    width: float = 1.8


@dataclass(frozen=True)
class Mark:
    """A moment worth a mark on the time axis."""

    x: float
    color: str
    label: str


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        name: of its PNG file, without the suffix.
        title: what it shows, for people.
        x_label, y_label: with units.
        series: drawn in this order.
        marks: on the x axis.
        log: whether the y axis is logarithmic.
        whole: y takes whole numbers.
        from_zero: whether y begins at 0.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    log: bool = False
    whole: bool = False
    from_zero: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to see."""
        return not any(len(series.x) for series in self.series)


@dataclass(frozen=True)
class Run:
    """What charts of one run are made of."""

    name: str
    history: History
    events: Sequence[Mapping[str, Any]]
    clock: RunClock


def charts_of(run: Run) -> list[Chart]:
    """The charts of one run that have something to show."""
    charts = [loss(run), accuracy(run), workers(run), speed(run), *extras(run)]
    return [chart for chart in charts if not chart.empty]


def charts_of_runs(runs: Sequence[Run]) -> list[Chart]:
    """The charts that lay several runs over each other."""
    charts = [
        _overlaid("loss", "Training loss, smoothed", runs, "loss"),
        _overlaid("accuracy", "Training accuracy, smoothed", runs, "accuracy"),
        _overlaid_epochs("val_loss", "Validation loss", runs),
        _overlaid_epochs("val_accuracy", "Validation accuracy", runs),
        _overlaid_in_time("workers", "Workers", runs, "workers"),
        _overlaid_in_time("speed", "Throughput", runs, "samples a second"),
    ]
    return [chart for chart in charts if not chart.empty]


# ---- one run ----


def loss(run: Run) -> Chart:
    """Loss over steps; on a logarithmic axis where it falls far."""
    series = _metric(run.history, "loss")
    return Chart("loss", "Loss", "step", "loss", series, log=_falls_far(series))


def accuracy(run: Run) -> Chart:
    """Accuracy over steps."""
    return Chart("accuracy", "Accuracy", "step", "accuracy", _metric(run.history, "accuracy"))


def workers(run: Run) -> Chart:
    """Workers over time, with every disruption marked."""
    unit, factor = _time_unit(run.clock.total_s)
    x, y = _workers(run)
    return Chart(
        "workers",
        "Workers and disruptions",
        unit,
        "workers",
        (Series("workers", "train", x / factor, y, "steps"),),
        marks=tuple(_marks(run, factor)),
        whole=True,
        from_zero=True,
    )


def speed(run: Run) -> Chart:
    """Samples a second over time."""
    unit, factor = _time_unit(run.clock.total_s)
    x, y = _speed(run)
    return Chart(
        "throughput",
        "Throughput",
        unit,
        "samples a second",
        (Series("samples a second", "speed", x / factor, y, "area"),),
        from_zero=True,
    )


def extras(run: Run) -> list[Chart]:
    """The learning rate where it changes, and whatever else the strategy records."""
    charts = []
    steps = run.history.steps
    known = {"step", "epoch", "samples", "tokens", "workers", "loss", "accuracy", "val_loss", "val_accuracy", "lr", "time"}
    names = [name for name in steps if name not in known] + (["lr"] if len(np.unique(steps["lr"])) > 1 else [])
    for name in names:
        x, y = thin(steps["step"], steps[name].astype(np.float64), 400)
        title = "Learning rate" if name == "lr" else name.replace("_", " ").capitalize()
        line, whole = Series(title.lower(), "train", x, y), bool((y == np.round(y)).all())
        charts.append(Chart(name, title, "step", title.lower(), (line,), whole=whole, from_zero=True))
    return charts


def _metric(history: History, name: str) -> tuple[Series, ...]:
    steps, epochs = history.steps, history.epochs
    raw = Series("", "train", *thin(steps["step"], steps[name]), "faint")
    train = Series("training", "train", *smooth(steps["step"], steps[name]))
    validation = Series("validation", "validation", *_known(epochs["step"], epochs[f"val_{name}"]), "dots")
    return raw, train, validation


def _workers(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Running seconds and worker counts: a change at each generation, and none while the run was stopped."""
    changes = [(event["time"], event["workers"]) for event in run.events if event["kind"] == "generation"]
    changes += [(start, 0) for start in run.clock.starts.tolist()]
    changes.sort(key=lambda change: change[0])
    times = [time for time, _ in changes] + [float(run.clock.ends[-1])]
    counts = [count for _, count in changes] + [changes[-1][1] if changes else 0]
    return thin(run.clock.seconds(times), np.array(counts, np.float64))


def _speed(run: Run) -> tuple[np.ndarray, np.ndarray]:
    steps = run.history.steps
    return throughput(run.clock.seconds(steps["time"]), steps["samples"], run.clock.total_s)


def _marks(run: Run, factor: float) -> list[Mark]:
    receipts = [event["receipt"] for event in run.events if event["kind"] == "disruption"]
    at_s = run.clock.seconds([receipt["time"] for receipt in receipts])
    shown: dict[int, int] = {}
    for place, seconds in enumerate(at_s.tolist()):
        stretch = int(seconds / (run.clock.total_s or 1.0) * MOST_MARKS) if len(receipts) > MOST_MARKS else place
        if stretch not in shown or receipts[place]["paused_s"] > receipts[shown[stretch]]["paused_s"]:
            shown[stretch] = place
    return [
        Mark(float(at_s[place]) / factor, _severity(receipts[place]["cause"]), receipt_text(receipts[place]))
        for place in shown.values()
    ]


def _severity(cause: str) -> str:
    return "good" if cause == "join" else "warn" if cause in ("leave", "drain") else "bad"


# ---- several runs ----


def _overlaid(name: str, title: str, runs: Sequence[Run], column: str) -> Chart:
    series = _series(runs, [smooth(run.history.steps["step"], run.history.steps[column]) for run in runs], "line")
    return Chart(name, title, "step", column, series, log=column == "loss" and _falls_far(series))


def _overlaid_epochs(column: str, title: str, runs: Sequence[Run]) -> Chart:
    series = _series(runs, [_known(run.history.epochs["step"], run.history.epochs[column]) for run in runs], "dots")
    return Chart(column, title, "step", column.removeprefix("val_"), series)


def _overlaid_in_time(name: str, title: str, runs: Sequence[Run], y_label: str) -> Chart:
    unit, factor = _time_unit(max(run.clock.total_s for run in runs))
    lines = [_workers(run) if name == "workers" else _speed(run) for run in runs]
    series = _series(runs, [(x / factor, y) for x, y in lines], "steps" if name == "workers" else "line")
    return Chart(name, title, unit, y_label, series, whole=name == "workers", from_zero=True)


def _series(
    runs: Sequence[Run], lines: Sequence[tuple[np.ndarray, np.ndarray]], kind: Literal["line", "dots", "steps"]
) -> tuple[Series, ...]:
    """A line a run; where some went the same way the first are broader, so that all can be seen."""
    same = any(np.array_equal(one, other) for (_, one), (_, other) in itertools.combinations(lines, 2))
    return tuple(
        Series(run.name, f"run{place}", x, y, kind, width=1.6 + 1.6 * (len(runs) - 1 - place) * same)
        for place, (run, (x, y)) in enumerate(zip(runs, lines, strict=True))
    )


# ---- small things ----


def _known(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    known = np.isfinite(y)
    return x[known], y[known]


def _falls_far(series: Sequence[Series]) -> bool:
    values = np.concatenate([s.y for s in series if s.kind != "faint"] or [np.empty(0)])
    return bool(len(values) and values.min() > 0 and values.max() / values.min() > 15)


def _time_unit(total_s: float) -> tuple[str, float]:
    if total_s < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if total_s < 3 * 3600 else ("hours", 3600.0)
