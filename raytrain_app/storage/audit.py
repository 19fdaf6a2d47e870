"""Proof of exactly once: counts, from the ledger of what workers applied, how often each row was used in each epoch."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytrain_app.errors import StorageError
from raytrain_app.storage import records
from raytrain_app.storage.folder import Folder

ROWS = "rows.npy"
SHOWN = 5


@dataclass
class EpochAudit:
    """The audit of one epoch.

    Attributes:
        epoch: from 1.
        steps: steps in the ledger.
        rows: rows that should have been used.
        applied: uses of rows.
        missing: rows not used, though the epoch was completed.
        repeated: rows used more than once, with how often.
        unknown: rows used that are not in the training split.
        conflicts: steps that the ledger has twice with different rows.
        complete: the epoch was completed.
    """

    epoch: int
    steps: int
    rows: int
    applied: int
    missing: list[int] = field(default_factory=list)
    repeated: dict[int, int] = field(default_factory=dict)
    unknown: list[int] = field(default_factory=list)
    conflicts: list[int] = field(default_factory=list)
    complete: bool = True

    @property
    def exact(self) -> bool:
        """Whether each row was used once (at most once in an epoch that was cut short)."""
        return not (self.missing or self.repeated or self.unknown or self.conflicts)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "exact": self.exact}

    def sentence(self) -> str:
        """The finding in one line."""
        head = f"epoch {self.epoch}: {self.steps:,} steps, {self.applied:,} of {self.rows:,} rows"
        if self.exact:
            return (
                f"{head}, each exactly once" if self.complete else f"{head} so far, each at most once (the epoch is not complete)"
            )
        faults: list[tuple[int, str, Sequence[object]]] = [
            (len(self.missing), "never used", self.missing),
            (len(self.repeated), "used more than once", [f"{row} ({count}x)" for row, count in self.repeated.items()]),
            (len(self.unknown), "used but not in the training split", self.unknown),
            (len(self.conflicts), "steps recorded twice with different rows", self.conflicts),
        ]
        found = [
            f"{number:,} {what}: {', '.join(map(str, some[:SHOWN]))}{' ...' if number > SHOWN else ''}"
            for number, what, some in faults
            if number
        ]
        return f"{head}; NOT exactly once: {'; '.join(found)}"


def summary(epochs: Sequence[EpochAudit]) -> list[str]:
    """One line for all epochs that were exact, and one for each that was not, or that is not complete."""
    whole = [epoch for epoch in epochs if epoch.exact and epoch.complete]
    lines = []
    if whole:
        steps, rows = sum(epoch.steps for epoch in whole), whole[0].rows
        lines = [f"{len(whole)} complete epochs, {steps:,} steps: each of {rows:,} rows exactly once an epoch"]
    return lines + [epoch.sentence() for epoch in epochs if epoch not in whole]


def write_rows(ledger: Folder, ids: np.ndarray) -> None:
    """Keeps the row ids of the training split, int64 (rows,), which every epoch must use."""
    buffer = io.BytesIO()
    np.save(buffer, ids, allow_pickle=False)
    ledger.write(ROWS, buffer.getvalue())


def audit_run(run: Folder) -> list[EpochAudit]:
    """Audits a run from its directory alone.

    Raises:
        StorageError: the run has no ledger, or it is damaged.
    """
    ledger = run.child("ledger")
    files = {int(found[1]): name for name in ledger.list() if (found := re.fullmatch(r"epoch-(\d+)\.jsonl", name))}
    if not files or not ledger.exists(ROWS):
        raise StorageError(f"the run in {run.at('')} has no ledger; run the job with `audit: true` (--set audit=true)")
    try:
        expected = np.load(io.BytesIO(ledger.read(ROWS)), allow_pickle=False)
    except ValueError as error:
        raise StorageError(f"{ledger.at(ROWS)} is damaged: {error}") from None
    completed = _completed_epochs(run)
    return [
        audit_epoch(epoch, records.parse(ledger.read(name), ledger.at(name)), expected, epoch <= completed)
        for epoch, name in sorted(files.items())
    ]


def audit_epoch(epoch: int, lines: list[records.Record], expected: np.ndarray, complete: bool) -> EpochAudit:
    """Audits the ledger of one epoch.

    Args:
        epoch: from 1.
        lines: {"epoch", "step", "ids"}. A line that stands twice, to the letter, was written again by a resumed driver and
            tells of one application.
        expected: row ids of the training split.
        complete: every row must have been used.
    """
    by_step: dict[int, list[int]] = {}
    conflicts = []
    for line in lines:
        earlier = by_step.setdefault(line["step"], line["ids"])
        if earlier != line["ids"]:
            conflicts.append(line["step"])
    applied = np.array([row for ids in by_step.values() for row in ids], dtype=np.int64)
    rows, counts = np.unique(applied, return_counts=True)
    return EpochAudit(
        epoch=epoch,
        steps=len(by_step),
        rows=len(expected),
        applied=len(applied),
        missing=np.setdiff1d(expected, rows).tolist() if complete else [],
        repeated={int(row): int(count) for row, count in zip(rows, counts, strict=True) if count > 1},
        unknown=np.setdiff1d(rows, expected).tolist(),
        conflicts=sorted(set(conflicts)),
        complete=complete,
    )


def _completed_epochs(run: Folder) -> int:
    lines = records.parse(run.read("metrics.jsonl"), run.at("metrics.jsonl")) if run.exists("metrics.jsonl") else []
    return max((line["epoch"] for line in lines if line["kind"] == "epoch"), default=0)
