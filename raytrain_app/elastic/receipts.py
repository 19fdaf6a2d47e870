"""What each disruption cost, worked out by the driver from the events and records that reach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CLASSES = ("useful", "redone", "starting", "idle")
CAUSES = ("node_lost", "server_lost", "worker_lost", "roll_back", "drain", "leave", "join")
"""Events that make a new generation, the one to name first where several happen at once."""

Seconds = Mapping[str, float]


@dataclass
class _Open:
    cause: str
    time_s: float
    detected_time_s: float
    last_step_time_s: float
    last_samples: int
    last_step: int
    workers_before: int
    workers_after: int
    seconds: dict[str, float]


@dataclass
class Receipts:
    """Turns the stream of a run into receipts; every disruption gets exactly one.

    A disruption opens with the generation that follows its cause, and closes with the first new step after it. Its pause is
    the gap between the last step before and the first one after, as the workers' clocks have it. When all workers die at once,
    steps that none of them had told of yet, those of the last fifth of a second, are not among those redone.
    """

    given: list[dict[str, Any]] = field(default_factory=list)
    _causes: list[dict[str, Any]] = field(default_factory=list)
    _open: _Open | None = None
    _workers: int = 0
    _resumed: dict[str, Any] | None = None
    _last: dict[str, Any] | None = None
    _last_seconds: dict[str, float] = field(default_factory=dict)
    _undone_steps: int = 0
    _undone_samples: int = 0

    def event(self, event: Mapping[str, Any]) -> None:
        """Takes an event."""
        if event["kind"] in CAUSES:
            self._causes.append(dict(event))
            if event["kind"] == "roll_back":  # of steps that nobody was told of
                self._undone_steps += event["steps"]
                self._undone_samples += event["samples"]
        elif event["kind"] == "resume" and self._last is not None:  # else the run began with it, and nothing was disturbed
            self._resumed = dict(event)
        elif event["kind"] == "generation":
            self._generation(event)

    def step(self, record: Mapping[str, Any], seconds: Seconds) -> dict[str, Any] | None:
        """Takes a step's record, with the run's worker-seconds by class up to now.

        Returns:
            The receipt of the disruption that the step ends, if it ends one.
        """
        receipt = None
        if self._open is not None and record["time"] >= self._open.time_s:
            receipt = self._close(self._open, record, seconds)
            self.given.append(receipt)
            self._open, self._resumed = None, None
            self._undone_steps = self._undone_samples = 0
        elif self._open is not None:  # a step from before it, whose record came later than the event
            opened = self._open
            opened.last_step_time_s, opened.last_step, opened.last_samples = record["time"], record["step"], record["samples"]
        self._last = dict(record)
        if self._open is None:
            self._last_seconds = dict(seconds)
        return receipt

    def _generation(self, event: Mapping[str, Any]) -> None:
        if self._last is not None and self._open is None:
            kinds = [cause["kind"] for cause in self._causes]
            cause = next((kind for kind in CAUSES if kind in kinds), "unknown")
            detected = next((c["time"] for c in self._causes if c["kind"] == cause), event["time"])
            self._open = _Open(
                cause=cause,
                time_s=event["time"],
                detected_time_s=detected,
                last_step_time_s=self._last["time"],
                last_samples=self._last["samples"],
                last_step=self._last["step"],
                workers_before=self._workers,
                workers_after=event["workers"],
                seconds=self._last_seconds,
            )
        elif self._open is not None:  # a fault while the generation was forming: one disruption, as the user sees it
            self._open.workers_after, self._open.time_s = event["workers"], event["time"]
        self._workers = event["workers"]
        self._causes = []

    def _close(self, opened: _Open, record: Mapping[str, Any], seconds: Seconds) -> dict[str, Any]:
        back = self._resumed or {"step": opened.last_step, "samples": opened.last_samples}
        return {
            "cause": opened.cause,
            "time": opened.detected_time_s,
            "detected_s": round(max(0.0, opened.detected_time_s - opened.last_step_time_s), 3),
            "paused_s": round(record["time"] - opened.last_step_time_s, 3),
            "steps_redone": max(0, opened.last_step - back["step"]) + self._undone_steps,
            "samples_redone": max(0, opened.last_samples - back["samples"]) + self._undone_samples,
            "workers_before": opened.workers_before,
            "workers_after": opened.workers_after,
            "worker_seconds": {name: round(seconds.get(name, 0.0) - opened.seconds.get(name, 0.0), 3) for name in CLASSES},
        }
