"""The run's story in order: steps numbered as they are done, epoch by epoch, and each epoch's end before the next.

Workers may be an epoch ahead of the slowest one, and validation runs beside them. What belongs to a later epoch is held back
here until the earlier one is closed, so that the lines of metrics.jsonl read like those of any other run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from raytrain_app.elastic.plan import Node, children
from raytrain_app.elastic.progress import Metrics, Progress
from raytrain_app.job import Job
from raytrain_app.strategies.parameter_server.ledger import Outcome

Numbered = tuple[int, dict[str, Any]]
"""A record and the run's clock after it."""


class Journal:
    """Turns outcomes into records. Not for several threads.

    Attributes:
        progress: where the run stands in the numbered order.
        records: those that the driver may not have written yet.
    """

    def __init__(self, job: Job, progress: Progress | None = None) -> None:
        self._job = job
        self.progress = progress or Progress()
        self.records: list[Numbered] = []
        self._early: dict[int, list[list[Outcome]]] = {}
        self._told_s = 0.0

    def add(self, epoch: int, outcomes: Sequence[Outcome], workers: int) -> None:
        """A step of `epoch` (from 0) is done.

        Args:
            epoch: from 0.
            outcomes: of its parts in order, one or (in bulk mode) several.
            workers: how many are at work now.
        """
        if epoch > self.progress.epoch:
            self._early.setdefault(epoch, []).append(list(outcomes))
            return
        loss = _tree_sum([outcome.loss for outcome in outcomes], (0, len(outcomes)))
        correct, rows = sum(outcome.correct for outcome in outcomes), sum(outcome.rows for outcome in outcomes)
        extras = zip(*(outcome.extra for outcome in outcomes), strict=True)
        extra = [_tree_sum(values, (0, len(outcomes))) for values in extras]
        self.progress.add_step(loss, correct, rows, extra)
        record = {
            "loss": loss / rows,
            "accuracy": correct / rows,
            "staleness": max(outcome.staleness for outcome in outcomes),
            "lr": outcomes[0].lr,
            "workers": workers,
            "time": max(outcome.time for outcome in outcomes),
        }
        ids = [row for outcome in outcomes for row in outcome.ids]
        self._record("step", {**record, "ids": ids} if ids else record)

    def close_epoch(self, scores: Metrics, lr: float, workers: int, time_s: float) -> Metrics:
        """The epoch under way is validated: writes its line, and then the steps of the next one that are done already.

        Returns:
            The epoch's metrics.
        """
        metrics = self.progress.end_epoch(scores, self._job)
        self._record("epoch", {**metrics, "lr": lr, "workers": workers, "time": time_s})
        for outcomes in self._early.pop(self.progress.epoch, []):
            self.add(self.progress.epoch, outcomes, workers)
        return metrics

    def forget(self, recorded: int) -> None:
        """The driver has written the records up to this clock."""
        self.records = [(clock, record) for clock, record in self.records if clock > recorded]

    def to_json(self) -> dict[str, Any]:
        early = {str(epoch): [[asdict(o) for o in step] for step in steps] for epoch, steps in self._early.items()}
        return {"progress": self.progress.to_json(), "records": list(self.records), "early": early, "told_s": self._told_s}

    @classmethod
    def from_json(cls, job: Job, values: Mapping[str, Any]) -> Journal:
        """Reads what `to_json` wrote."""
        journal = cls(job, Progress.from_json(values["progress"]))
        journal.records = [(clock, record) for clock, record in values["records"]]
        journal._told_s = values["told_s"]
        journal._early = {
            int(epoch): [[Outcome(**outcome) for outcome in step] for step in steps] for epoch, steps in values["early"].items()
        }
        return journal

    def _record(self, kind: str, values: Mapping[str, Any]) -> None:
        progress = self.progress
        # Steps that were held back are told later than they were done, and lines are in the order of their times.
        self._told_s = max(self._told_s, values["time"])
        where = {"kind": kind, "epoch": progress.epoch + (kind == "step"), "step": progress.step, "samples": progress.samples}
        self.records.append((progress.clock, {**where, **values, "time": self._told_s}))


def _tree_sum(values: Sequence[float], node: Node) -> float:
    """The sum in the order of the synchronous reduction, so that its bits are the same."""
    if node[1] - node[0] == 1:
        return values[node[0]]
    left, right = children(node)
    return _tree_sum(values, left) + _tree_sum(values, right)
