"""Where a run stands, as plain values that every worker holds equal: the cursor, the epoch's totals, early stopping."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from raytrain_app.elastic.receipts import CLASSES
from raytrain_app.job import Job

Metrics = dict[str, float]
UNDECIDED = "undecided"
"""Name of a worker's seconds that are not known to have counted yet."""


@dataclass
class Progress:
    """Everything about the run that is not in the model; travels as JSON in checkpoints and to newcomers.

    Attributes:
        step: steps applied; the cursor.
        epoch: epochs completed.
        samples: rows applied.
        loss_sum, correct, rows, extra: totals of the epoch under way; `extra` is for the task's own metrics.
        metrics: of the last completed epoch.
        best: best value of the early-stopping metric so far.
        waited: epochs since it got better.
        stopped_early: early stopping ended the run.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    correct: float = 0
    rows: int = 0
    extra: list[float] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    best: float | None = None
    waited: int = 0
    stopped_early: bool = False

    @property
    def clock(self) -> int:
        """Steps and epoch ends applied: of two replicas, the one with the higher clock is further."""
        return self.step + self.epoch

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Progress:
        return cls(**values)

    def add_step(self, loss: float, correct: float, rows: int, extra: Sequence[float] = ()) -> None:
        """A step with these totals has been applied."""
        self.step += 1
        self.samples += rows
        self.loss_sum += loss
        self.correct += correct
        self.rows += rows
        self.extra = [before + more for before, more in zip(self.extra or [0.0] * len(extra), extra, strict=True)]

    def end_epoch(self, others: Metrics, job: Job) -> Metrics:
        """Closes the epoch: its metrics (`others` are the task's own and those of the validation), and early stopping."""
        self.metrics = {"loss": self.loss_sum / self.rows, "accuracy": self.correct / self.rows, **others}
        self.epoch += 1
        self.loss_sum, self.correct, self.rows, self.extra = 0.0, 0, 0, []
        rule = job.train.early_stopping
        if rule is not None:
            value = self.metrics[rule.monitor]
            if self.best is None or (self.best - value if rule.mode == "min" else value - self.best) > rule.min_delta:
                self.best, self.waited = value, 0
            else:
                self.waited += 1
            self.stopped_early = self.waited >= rule.patience
        return self.metrics

    def finished(self, job: Job) -> bool:
        """Whether all epochs are done, or early stopping said so."""
        return self.stopped_early or self.epoch >= job.train.epochs


def record_clock(record: Mapping[str, Any]) -> int | None:
    """The clock after what a metrics line tells was applied; None for lines that are no step and no epoch."""
    if record["kind"] == "step":
        return int(record["step"] + record["epoch"] - 1)
    return int(record["step"] + record["epoch"]) if record["kind"] == "epoch" else None


def steps_per_epoch(num_rows: int, global_batch_size: int) -> int:
    """Steps of an epoch; the last one may be smaller, and none is dropped."""
    return math.ceil(num_rows / global_batch_size)


class Stopwatch:
    """Adds up a worker's seconds by what they went into. One class is running at any time, so they sum to its lifetime.

    `useful` steps that counted, `redone` work that was thrown away, `starting` until the first step is possible, `idle`
    waiting for others. Of a step under way it is not known yet whether it counts. Heartbeats read it from another thread.

    Attributes:
        seconds: by class, up to the last switch.
        started_time_s: when it began, seconds since the epoch.
    """

    def __init__(self) -> None:
        self.started_time_s = time.time()
        self.seconds = dict.fromkeys(CLASSES, 0.0)
        self._lock = threading.Lock()
        self._running = "starting"
        self._since_s = time.monotonic()

    def switch(self, to: str, book: str | None = None) -> float:
        """Books the time since the last switch (under `book` if given, else the running class) and runs `to`; returns it."""
        with self._lock:
            now_s = time.monotonic()
            spent_s = now_s - self._since_s
            self.seconds[book or self._running] += spent_s
            self._running, self._since_s = to, now_s
        return spent_s

    def read(self) -> dict[str, float]:
        """Seconds by class up to now, those of a step under way as `UNDECIDED`."""
        with self._lock:
            running = UNDECIDED if self._running == "useful" else self._running
            read = {**self.seconds, UNDECIDED: 0.0}
            read[running] += time.monotonic() - self._since_s
        return read

    def settle(self) -> dict[str, float]:
        """As `read`, once there is no step under way any more."""
        self.switch("idle")
        return self.read()
