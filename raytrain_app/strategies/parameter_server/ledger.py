"""Who works on what: leases of pieces of work, handed out in order, taken back from the dead, each done once.

A lease is a number: `step * parts + part`. It says which rows of which epoch to use, identifies the push that comes of it,
and stays the same when another worker does the work again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from raytrain_app.strategies.parameter_server.window import Window

WAIT, END = -1, -2
"""Instead of a lease: there is none now; there will never be one again."""


@dataclass(frozen=True)
class Plan:
    """How much work there is, and in which order it may be taken.

    Attributes:
        steps_per_epoch: steps.
        epochs: epochs.
        parts: leases of a step.
        sync: "async" hands out leases without a limit; "bounded" holds one back while it could make a gradient that is
            being computed miss more than `staleness` updates; "bulk" holds back a step until the one before is done.
        staleness: for "bounded".
    """

    steps_per_epoch: int
    epochs: int
    parts: int = 1
    sync: Literal["async", "bounded", "bulk"] = "async"
    staleness: int | None = None

    @property
    def per_epoch(self) -> int:
        """Leases of an epoch."""
        return self.steps_per_epoch * self.parts

    @property
    def total(self) -> int:
        """Leases of the run."""
        return self.per_epoch * self.epochs


@dataclass
class Outcome:
    """What a worker tells about a lease that it has computed.

    Attributes:
        worker: its id.
        loss: sum of the losses.
        correct: rows predicted correctly.
        rows: number of rows.
        extra: what else it has scored, for the task's own metrics.
        lr: learning rate.
        staleness: updates that its gradient missed.
        ids: with audit, the row ids that it used.
        time: when it was applied.
    """

    worker: str
    loss: float
    correct: float
    rows: int
    extra: list[float]
    lr: float
    staleness: int
    ids: list[int]
    time: float


class StepDone(NamedTuple):
    """A step (in async modes: a lease) that is done, and the outcomes of its parts that had not been told of before."""

    step: int
    outcomes: list[Outcome]


@dataclass
class Held:
    """A lease at work: by whom, the version of the parameters when it was handed out, and when that was (monotonic)."""

    worker: str
    version: int
    since_s: float = field(default_factory=time.monotonic)


@dataclass
class Counts:
    """What has happened to leases so far.

    Attributes:
        refused: gradients that were too old.
        returned: leases taken back from workers that died or left.
        lost: leases that were done, and undone when a worker and a server were lost together.
        waited: requests for a lease that had to wait.
        waited_s: for how long, in all.
    """

    refused: int = 0
    returned: int = 0
    lost: int = 0
    waited: int = 0
    waited_s: float = 0.0


class Ledger:
    """The leases of a run. Not for several threads.

    Attributes:
        next: the first lease that was never handed out.
        done: leases that all servers have applied.
        scored: epochs whose validation is known. No lease is handed out more than one epoch beyond them.
        draining: hand out nothing but leases that were taken back and the rest of a step begun, so that soon nothing is at work.
        ended: the run is over; asking for a lease gives `END`.
        counts: what has happened.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.next = self.scored = 0
        self.done = Window()
        self.draining = self.ended = False
        self.counts = Counts()
        self._held: dict[int, Held] = {}
        self._returned: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        self._pushed_by: dict[int, str] = {}
        self._confirmed: set[int] = set()
        self._undone: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether everything is done."""
        return self.done.low >= self.plan.total

    @property
    def quiet(self) -> bool:
        """Whether nothing is at work or has to be done again: then all servers have applied the same leases."""
        return not (self._held or self._returned or self._outcomes)

    @property
    def epochs_done(self) -> int:
        """Epochs of which every lease is done."""
        return self.done.low // self.plan.per_epoch

    # ---- workers ----

    def take(self, worker: str, version: int) -> int:
        """A lease for a worker that holds none (what it held is taken back); else `WAIT` or `END`.

        Args:
            worker: its id.
            version: of the parameters that it will compute with.
        """
        self.forget(worker)
        if self.ended:
            return END
        lease = min(self._returned, default=self.next)
        if not self._may_start(lease, version):
            return WAIT
        self._hold(worker, lease, version)
        return lease

    def wants(self, lease: int) -> bool:
        """Whether somebody has to compute a lease, or is about to."""
        return lease in self._held or lease in self._returned

    def hold(self, worker: str, lease: int, version: int) -> None:
        """A worker says that it is at work on a lease, to a ledger that was restored and may not know it."""
        if lease not in self.done and lease not in self._outcomes and lease not in self._held:
            self._hold(worker, lease, version)

    def applied(self, lease: int, outcome: Outcome) -> None:
        """The first server has applied a lease's push, now or before."""
        self.admit(lease + 1)
        self._held.pop(lease, None)
        self._returned.discard(lease)
        if lease not in self.done:
            self._outcomes.setdefault(lease, outcome)
            self._pushed_by[lease] = outcome.worker

    def confirm(self, lease: int) -> list[StepDone]:
        """All servers have applied a lease's push.

        Returns:
            What is done by this for the first time: the lease, or in bulk mode whole steps, in order.
        """
        if lease not in self._outcomes:
            return []
        self._confirmed.add(lease)
        if self.plan.sync != "bulk":
            return [StepDone(lease, self._complete(lease) or [])]
        steps = []
        while (outcomes := self._complete(step := self.done.low // self.plan.parts)) is not None:
            steps.append(StepDone(step, outcomes))
        return steps

    def put_back(self, lease: int) -> None:
        """A gradient was refused: its lease is handed out again."""
        self.counts.refused += 1
        self._return(lease)

    def forget(self, worker: str) -> None:
        """Takes back the leases that a worker holds: it does not know of them any more."""
        self._take_back([lease for lease, held in self._held.items() if held.worker == worker])

    def release(self, worker: str) -> None:
        """A worker is gone: takes back what it holds, and what it had not confirmed."""
        self.forget(worker)
        self._take_back([lease for lease, pusher in self._pushed_by.items() if pusher == worker and lease not in self._confirmed])

    def holders(self, before_s: float) -> set[str]:
        """Workers that were at the lease they hold before `before_s` (monotonic) already."""
        return {held.worker for held in self._held.values() if held.since_s < before_s}

    # ---- servers ----

    def admit(self, stop: int) -> None:
        """Some server or worker knows leases up to `stop`, so they count as handed out; a restored ledger may not have known.

        Those that nobody is known to be at are handed out again.
        """
        if stop > self.next:
            self._returned.update(range(self.next, stop))
            self.next = stop

    def undo(self, leases: Iterable[int]) -> None:
        """Some server lacks leases that were done, after it and the worker that had pushed them were lost together."""
        for lease in leases:
            if lease in self.done:
                self.done.discard(lease)
                self.counts.lost += 1
                self._undone.add(lease)
                self._return(lease)

    def to_json(self) -> dict[str, Any]:
        """What a restored ledger needs; who works on what it learns from the workers."""
        return {
            "next": self.next,
            "done": self.done.to_json(),
            "scored": self.scored,
            "undone": sorted(self._undone),
            "outcomes": {str(lease): asdict(outcome) for lease, outcome in self._outcomes.items()},
            "counts": asdict(self.counts),
        }

    @classmethod
    def from_json(cls, plan: Plan, values: Mapping[str, Any]) -> Ledger:
        """Reads what `to_json` wrote. Leases that were at work or not confirmed will be handed out again, if nobody speaks up."""
        ledger = cls(plan)
        ledger.next, ledger.scored = values["next"], values["scored"]
        ledger.done = Window.from_json(values["done"])
        ledger.counts = Counts(**values["counts"])
        ledger._undone = set(values["undone"])
        if (
            plan.sync != "bulk"
        ):  # else they are of parts that waited for their step, and the state of a range has whole steps alone
            ledger._outcomes = {int(lease): Outcome(**outcome) for lease, outcome in values["outcomes"].items()}
        ledger._pushed_by = {lease: outcome.worker for lease, outcome in ledger._outcomes.items()}
        ledger._returned = set(ledger.done.missing(ledger.next))
        return ledger

    # ---- inside ----

    def _complete(self, step: int) -> list[Outcome] | None:
        """Counts a step as done, and returns the outcomes that are new; None while a part of it is not confirmed."""
        leases = range(step * self.plan.parts, (step + 1) * self.plan.parts)
        if any(part not in self._confirmed and part not in self.done for part in leases):
            return None
        outcomes = []
        for part in leases:
            if part not in self._confirmed:
                continue
            self.done.add(part)
            self._returned.discard(part)
            outcome = self._outcomes.pop(part)
            del self._pushed_by[part]
            if part not in self._undone:
                outcomes.append(outcome)
        self._confirmed.difference_update(leases)
        self._undone.difference_update(leases)
        return outcomes

    def _may_start(self, lease: int, version: int) -> bool:
        plan = self.plan
        begins_step = lease not in self._returned and lease % plan.parts == 0
        if begins_step and (lease >= plan.total or self.draining):
            return False
        if lease >= (self.scored + 2) * plan.per_epoch:
            return False
        if plan.sync == "bulk":
            return lease // plan.parts <= self.done.low // plan.parts
        if plan.sync == "bounded" and plan.staleness is not None:
            # A gradient at work will have missed what was applied since it was begun, and at most one update of each other.
            oldest = min((held.version for held in self._held.values()), default=version)
            return version - oldest + len(self._held) <= plan.staleness
        return True

    def _hold(self, worker: str, lease: int, version: int) -> None:
        self.admit(lease + 1)
        self._returned.discard(lease)
        self._held[lease] = Held(worker, version)

    def _take_back(self, leases: Iterable[int]) -> None:
        for lease in leases:
            self.counts.returned += 1
            self._return(lease)

    def _return(self, lease: int) -> None:
        self._held.pop(lease, None)
        if lease not in self.done:
            self._returned.add(lease)
