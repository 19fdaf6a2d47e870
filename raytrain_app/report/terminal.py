"""A run on the terminal: a live bar where someone watches, plain lines where a file or a log does, then the result.

Progress goes to stderr and the result to stdout, so `raytrain run job.yaml > result.txt` keeps the result alone.
"""

from __future__ import annotations

import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from raytrain_app.report.updates import Update

Show = Callable[[Update], None]
LINE_EVERY_S = 5.0


@contextmanager
def shown(*, quiet: bool, epochs: int, console: Console | None = None) -> Iterator[Show]:
    """Shows the updates of one run until the block ends.

    Args:
        quiet: show nothing.
        epochs: of the whole run, for "epoch 2/3".
        console: where to; None is stderr.

    Yields:
        The function that takes each update.
    """
    console = console or Console(stderr=True)
    if quiet:
        yield lambda update: None
    elif console.is_terminal and not console.is_dumb_terminal:
        with _LiveBar(console, epochs) as show:
            yield show
    else:
        yield _Lines(console, epochs)


class Rate:
    """Samples a second over the last few seconds, from cumulative counts; a restart of the count starts it anew."""

    def __init__(self, window_s: float = 5.0) -> None:
        self.window_s = window_s
        self.seen: deque[tuple[float, int]] = deque()

    def add(self, time_s: float, samples: int) -> float | None:
        """Takes the count at a time; returns the rate, or None while there is too little to tell."""
        if self.seen and (samples < self.seen[-1][1] or time_s < self.seen[-1][0]):
            self.seen.clear()
        self.seen.append((time_s, samples))
        while len(self.seen) > 2 and self.seen[1][0] <= time_s - self.window_s:
            self.seen.popleft()
        elapsed_s = time_s - self.seen[0][0]
        return (samples - self.seen[0][1]) / elapsed_s if elapsed_s > 0 else None


def step_text(record: Mapping[str, Any], epochs: int, rate: float | None) -> str:
    """A line of metrics.jsonl for people, of at most 80 characters where numbers are not extreme.

    A step: "epoch 2/3  step 210/342  loss 0.2130  acc 0.9375  8,412 samples/s  2 workers".
    An epoch: "epoch 2/3  loss 0.2130  acc 0.9375  val_loss 0.1800  val_acc 0.9510  2 workers".
    """
    parts = [f"epoch {record['epoch']}/{epochs}"]
    if record["kind"] == "step":
        parts.append(f"step {record['step']}/{record['total_steps']}")
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        if record.get(name) is not None:
            parts.append(f"{name.replace('accuracy', 'acc')} {record[name]:.4f}")
    if rate is not None:
        parts.append(f"{rate:,.0f} samples/s")
    parts.append(_workers(record["workers"]))
    return "  ".join(parts)


def result_lines(result: Mapping[str, Any], directory: str) -> list[str]:
    """The result as an aligned table, one row a line; what the run did not measure is left out."""
    rows = [(label, text) for label, value in _result_rows(result) if (text := value) is not None]
    rows.append(("run directory", directory))
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {text}" for label, text in rows]


def next_lines(directory: str, storage: str) -> list[str]:
    """What to do with the run that ended, as commands."""
    run = shlex.quote(PurePath(directory).name if storage == "runs" else directory)
    commands = {
        f"raytrain report {run}": "what happened, as a page",
        f"raytrain evaluate {run}": "what it gets right and wrong",
        f"raytrain predict {run} IMAGE": "what it takes a picture for",
    }
    width = max(map(len, commands))
    return ["Next:", *(f"  {command:<{width}}   # {about}" for command, about in commands.items())]


def _result_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    yield "status", str(result["status"]).replace("_", " ")
    for split in ("test", "validation", "training"):
        prefix = {"test": "test", "validation": "val", "training": "train"}[split]
        for metric in ("accuracy", "loss"):
            value = result.get(f"{prefix}_{metric}")
            yield f"{split} {metric}", None if value is None else f"{value:.4f}"
    yield "epochs, steps", f"{result['epochs']}, {result['steps']:,}"
    since = round(result["samples_per_s"] * result["wall_s"])  # a run that was resumed has some from before
    counted = f"{result['samples']:,}" if since == result["samples"] else f"{result['samples']:,}, of them {since:,}"
    yield "samples", f"{counted} in {result['wall_s']:.1f} s, {result['samples_per_s']:,.0f} a second"
    tokens_per_s, utilization = result.get("tokens_per_s"), result.get("model_flops_utilization")
    yield "tokens", None if tokens_per_s is None else f"{tokens_per_s:,.0f} a second"
    yield "FLOPs utilization", None if utilization is None else f"{100 * utilization:.1f} % of the devices' peak"
    if result.get("disruptions"):
        pauses_s = result.get("pause_s") or [0.0]
        redone = f"{result['steps_redone']:,} steps redone, longest pause {max(pauses_s):.1f} s"
        yield "disruptions", f"{len(result['disruptions'])}, {redone}"
    yield "weights sha256", result.get("weights_sha256")
    yield "best checkpoint", result.get("checkpoint")


def _workers(number: int) -> str:
    return f"{number} worker" if number == 1 else f"{number} workers"


class _Lines:
    """One line for each thing that happened, and one every few seconds for the steps."""

    def __init__(self, console: Console, epochs: int) -> None:
        self.console = console
        self.epochs = epochs
        self.rate = Rate()
        self.last_s = time.monotonic()

    def __call__(self, update: Update) -> None:
        record = update.record
        rate = self.rate.add(record["time"], record["samples"]) if update.kind == "step" else None
        if update.kind == "step" and time.monotonic() - self.last_s < LINE_EVERY_S:
            return
        text = update.text or (step_text(record, self.epochs, rate) if update.kind in ("step", "epoch") else "")
        if text:
            # Not wrapped: a log line is one line, whatever width rich believes the log to have.
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self.last_s = time.monotonic()


class _LiveBar:
    """A bar over the steps of the run; what is worth keeping scrolls up above it."""

    def __init__(self, console: Console, epochs: int) -> None:
        self.console = console
        self.epochs = epochs
        self.rate = Rate()
        self.task: TaskID | None = None
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            transient=True,
            redirect_stdout=False,  # what libraries print is not meant for this terminal
            redirect_stderr=False,
        )

    def __enter__(self) -> _LiveBar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, update: Update) -> None:
        if update.kind == "step":
            self._step(update.record)
        elif update.kind == "epoch":
            self._keep(update.text or step_text(update.record, self.epochs, None))
        elif update.kind == "phase":
            self._phase(update.text)
        elif update.text:
            self._keep(f"[yellow]{escape(update.text)}[/yellow]" if update.kind == "note" else escape(update.text), markup=True)

    def _keep(self, text: str, markup: bool = False) -> None:
        self.console.print(text, markup=markup, highlight=False)

    def _phase(self, text: str) -> None:
        if self.task is None:
            self.task = self.progress.add_task(escape(text), total=None, numbers="")
        else:
            self.progress.update(self.task, description=escape(text))

    def _step(self, record: Mapping[str, Any]) -> None:
        if self.task is not None and self.progress.tasks[0].total is None:
            # A bar of its own for the steps: the time left must not be reckoned from the seconds spent starting.
            self.progress.remove_task(self.task)
            self.task = None
        rate = self.rate.add(record["time"], record["samples"])
        numbers = [f"loss {record['loss']:.3f}"]
        if record.get("accuracy") is not None:
            numbers.append(f"acc {record['accuracy']:.3f}")
        if rate is not None:
            numbers.append(f"{rate:,.0f} samples/s")
        numbers.append(_workers(record["workers"]))
        now: dict[str, Any] = {"description": f"epoch {record['epoch']}/{self.epochs}", "numbers": " ".join(numbers)}
        if self.task is None:
            self.task = self.progress.add_task(completed=record["step"], total=record["total_steps"], **now)
        else:
            self.progress.update(self.task, completed=record["step"], total=record["total_steps"], **now)
