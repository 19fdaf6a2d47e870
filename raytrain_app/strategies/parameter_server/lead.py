"""What the first server does beside its range: it hands out leases and tells the run's story."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raytrain_app.elastic.progress import Metrics, Progress
from raytrain_app.job import Job
from raytrain_app.strategies.parameter_server.journal import Journal, Numbered
from raytrain_app.strategies.parameter_server.ledger import WAIT, Ledger, Plan

GRACE_S = 2.0
"""How long a restored ledger waits for the workers to say what they are at, before it hands out leases again."""


@dataclass(frozen=True)
class Scored:
    """What came out of the end of an epoch.

    Attributes:
        metrics: the task's own ones and those of the validation.
        stop: a callback of the task's wants training to stop.
    """

    metrics: Metrics
    stop: bool = False


class Lead:
    """Ledger and journal of one run. All methods are called under the first server's lock.

    Args:
        job: what is trained.
        plan: the run's leases.
        state: of `to_json`; empty at the start of a run.

    Attributes:
        beyond: in bulk mode, a version from which nobody can go on, since a step before it is incomplete; -1 without.
    """

    def __init__(self, job: Job, plan: Plan, state: Mapping[str, Any]) -> None:
        self.ledger = Ledger.from_json(plan, state["ledger"]) if state else Ledger(plan)
        self.journal = Journal.from_json(job, state["journal"]) if state else Journal(job)
        self._silent_until_s = time.monotonic() + GRACE_S if state else 0.0
        self.beyond = -1
        self._workers: set[str] = set()
        self._expected: frozenset[str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Ledger and journal as of now."""
        return {"ledger": self.ledger.to_json(), "journal": self.journal.to_json()}

    # ---- workers ----

    def hello(self, worker: str, holds: int, version: int) -> None:
        """A worker has connected; it is at work on lease `holds`, or on none (-1)."""
        self._workers.add(worker)
        if holds >= 0:
            self.ledger.hold(worker, holds, version)
        else:
            self.ledger.forget(worker)

    def goodbye(self, worker: str) -> None:
        """A worker's connection is gone, and so, most likely, is the worker."""
        self._workers.discard(worker)
        self.ledger.release(worker)

    def take(self, worker: str, version: int) -> int:
        """See `Ledger.take`."""
        return WAIT if self._is_silent() else self.ledger.take(worker, version)

    def confirm(self, lease: int) -> bool:
        """All servers have applied a lease. True when an epoch is complete by it."""
        before = self.ledger.epochs_done
        for step, outcomes in self.ledger.confirm(lease):
            if outcomes:
                self.journal.add(step // self.ledger.plan.steps_per_epoch, outcomes, len(self._workers))
        return self.ledger.epochs_done > before

    def out_of_reach(self, lease: int, version: int) -> None:
        """A worker cannot compute a lease, since some server is at `version` already.

        The lease is lost, unless whoever had pushed it has spoken up meanwhile.
        """
        if self.ledger.wants(lease):
            self.beyond = max(self.beyond, version)

    # ---- control ----

    @property
    def workers(self) -> int:
        """Workers that are connected."""
        return len(self._workers)

    @property
    def progress(self) -> Progress:
        return self.journal.progress

    def expect(self, workers: frozenset[str]) -> None:
        """The workers that there are: a restored ledger waits for them, but not longer than `GRACE_S`."""
        self._expected = workers

    def unscored_epoch(self) -> int | None:
        """The epoch (from 1) that is complete and whose validation is to be made next."""
        return self.ledger.scored + 1 if self.ledger.epochs_done > self.ledger.scored else None

    def scored(self, scored: Scored, lr: float) -> None:
        """The validation of the epoch under way is known."""
        self.journal.close_epoch(scored.metrics, lr, len(self._workers), time.time())
        self.progress.stopped_early = self.progress.stopped_early or scored.stop
        self.ledger.scored += 1

    def undelivered(self, recorded: int) -> list[Numbered]:
        """Records that the driver may not have."""
        self.journal.forget(recorded)
        return self.journal.records

    def _is_silent(self) -> bool:
        if time.monotonic() >= self._silent_until_s or (self._expected is not None and self._expected <= self._workers):
            self._silent_until_s = 0.0
            return False
        return True
