"""A worker's connection to the membership: signals and heartbeats in a thread, records that must not be lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_app.actors import Actor, wait_for
from raytrain_app.elastic.group import Group
from raytrain_app.elastic.mail import Signals
from raytrain_app.elastic.progress import Stopwatch
from raytrain_app.elastic.roster import Generation, WorkerInfo

FLUSH_S = 15.0
"""How long a worker waits at the end for the driver to have written everything; a driver that takes longer is gone."""
SEND_S = 0.5
"""Shortest pause between two deliveries of step records."""


class Link:
    """One worker's end. All methods but the thread's are called from the training loop.

    Step and epoch records are the same on every worker. Each keeps them until the driver has written them; the leader
    delivers them, and a new leader goes on where the last delivery ended.

    Attributes:
        stopwatch: where this worker's seconds go.
        signals: the newest from the membership.
        clock: steps and epoch ends that this worker's replica has applied; -1 without state.
        group: its process group, which the thread breaks off when a member is lost that may not close its connections.
    """

    def __init__(self, membership: Actor, info: WorkerInfo, stopwatch: Stopwatch) -> None:
        self.info, self.stopwatch = info, stopwatch
        self.signals = Signals()
        self.clock = -1
        self.group: Group | None = None
        self.membership = membership
        self._generation: Generation | None = None
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._sent = 0
        self._sent_s = 0.0
        self._delivery: Any = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="membership", daemon=True)
        self._thread.start()

    def join(self) -> Generation | None:
        """Blocks until this worker is in a generation; None means that the run is over for it."""
        self.deliver()
        generation: Generation | None = wait_for(self.membership.join.remote(self.info, self.clock))
        if generation is not None:
            self._sent = generation.recorded
        self._generation = generation
        return generation

    def record(self, record: dict[str, Any]) -> None:
        """Adds a step or epoch record; the leader delivers it within about `SEND_S`."""
        self._pending.append((self.clock, record))
        if time.monotonic() - self._sent_s >= SEND_S:
            self.deliver()

    def with_unrecorded(self, progress: Mapping[str, Any]) -> dict[str, Any]:
        """For a snapshot: its progress, and the records that the driver may not have, as nobody will take those steps again."""
        recorded = max(self.signals.recorded, self._generation.recorded if self._generation else 0)
        return {**progress, "unrecorded": [(clock, record) for clock, record in self._pending if clock > recorded]}

    def take_up(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Goes on from a snapshot with the records that came with it; returns its progress."""
        self._pending = [(clock, record) for clock, record in saved.get("unrecorded", ())]
        return {name: value for name, value in saved.items() if name != "unrecorded"}

    def deliver(self, *, last: bool = False) -> None:
        """Sends what the membership does not have yet, if this worker leads, or if it is the `last` word; one at a time."""
        self._sent_s = time.monotonic()
        recorded = self.signals.recorded
        self._pending = [(clock, record) for clock, record in self._pending if clock > recorded]
        leads = self._generation is not None and self._generation.rank == 0
        if not (leads or last) or not self._arrived():
            return
        news = [(clock, record) for clock, record in self._pending if clock > self._sent]
        if news:
            self._delivery = self.membership.record.remote(news)

    def _arrived(self) -> bool:
        """Whether the delivery under way, if any, has come to an end; then `_sent` is what the membership has."""
        if self._delivery is not None:
            if not ray.wait([self._delivery], timeout=0)[0]:
                return False
            try:
                self._sent = wait_for(self._delivery)
            except RayError:
                self._sent = self.signals.recorded
            self._delivery = None
        return True

    def event(self, kind: str, **details: Any) -> None:
        """Sends an event for the run's event log."""
        self.membership.record.remote([(None, {"kind": kind, "time": time.time(), **details})])

    def leave(self) -> None:
        """Tells that this worker leaves; it must not join again."""
        wait_for(self.membership.leave.remote(self.info.worker_id, self.stopwatch.settle()))

    def done(self, summary: dict[str, Any]) -> None:
        """Makes sure that the driver has written all records, and tells that this worker finished the run."""
        deadline_s = time.monotonic() + FLUSH_S
        written = 0
        while written < self.clock and time.monotonic() < deadline_s:
            self.deliver(last=True)
            written = wait_for(self.membership.written.remote(self.clock))
        wait_for(self.membership.done.remote(self.info.worker_id, summary, self.stopwatch.settle()))

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _listen(self) -> None:
        version = -1
        while not self._closed.is_set():
            generation = self._generation.number if self._generation else 0
            try:
                signals: Signals = wait_for(
                    self.membership.signals.remote(self.info, generation, self.clock, version, self.stopwatch.read())
                )
            except RayError:
                # The actor is being restarted, or the run is over and it is gone: training goes on without it meanwhile.
                self._closed.wait(0.5)
                continue
            self.signals, version = signals, signals.version
            group = self.group
            if group is not None and signals.broken >= group.generation.number:
                group.break_off()
