"""What a source holds and everything that is wrong with it, read in this process and kept as a few numbers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from raytrain_app.data.checking import MAX_EXAMPLES, GoodRows, good_rows
from raytrain_app.data.load import plan_data, wanted
from raytrain_app.data.parts import SPLITS
from raytrain_app.task import Columns, Task

if TYPE_CHECKING:
    from raytrain_app.job import Data

_SAMPLES = 10


@dataclass
class SplitSummary:
    """What one split has.

    Attributes:
        rows: good rows.
        bad: bad rows.
        labels: good rows of each class.
        low: smallest value of x, None without rows.
        high: the largest.
        samples: the first rows of x, shape (at most 10, *shape).
    """

    labels: np.ndarray
    samples: np.ndarray
    rows: int = 0
    bad: int = 0
    low: float | None = None
    high: float | None = None


@dataclass
class Inspection:
    """What a source has.

    Attributes:
        source: as it was named.
        format: the format that was read; empty if nothing could be.
        columns: shape and dtype of x, number of classes.
        splits: by name.
        duplicates: images that two splits share, by the names of both.
        problems: everything wrong, one sentence each.
        notes: what else the user should know.
    """

    source: str
    format: str
    columns: Columns
    splits: dict[str, SplitSummary] = field(default_factory=dict)
    duplicates: dict[tuple[str, str], int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def inspect_data(data: Data, task: Task) -> Inspection:
    """Reads all rows that a job's `data` section names and sums them up. Needs no Ray.

    Raises:
        DataError: the section and the task's columns do not go together; what is wrong with files and rows is in the result.
    """
    want = wanted(data, task)
    plan = plan_data(data, task, want)
    source = data.source or task.default_source
    result = Inspection(
        source, plan.parts[0].format if plan.parts else "", want.columns, problems=plan.problems, notes=plan.notes
    )
    hashes: dict[str, list[np.ndarray]] = {}
    for part in plan.parts:
        if part.split not in result.splits:
            empty = np.empty((0, *want.columns.shape), want.columns.dtype)
            result.splits[part.split] = SplitSummary(np.zeros(want.columns.num_classes, np.int64), empty)
        for rows in good_rows(part, want, task.prepare if want.raw else None):
            _add(result.splits[part.split], rows)
            result.problems += rows.findings.examples + ([rows.findings.error] if rows.findings.error else [])
            hashes.setdefault(part.split, []).append(_hashes(rows.x))
    result.duplicates = _duplicates({split: np.concatenate(parts) for split, parts in hashes.items()})
    result.problems += _of_all_rows(result)
    return result


def _add(summary: SplitSummary, rows: GoodRows) -> None:
    summary.bad += rows.findings.bad
    if not len(rows.y):
        return
    summary.rows += len(rows.y)
    summary.labels += np.bincount(rows.y, minlength=len(summary.labels))
    low, high = float(rows.x.min()), float(rows.x.max())
    summary.low = low if summary.low is None else min(low, summary.low)
    summary.high = high if summary.high is None else max(high, summary.high)
    if len(summary.samples) < _SAMPLES:
        summary.samples = np.concatenate([summary.samples, rows.x[: _SAMPLES - len(summary.samples)]])


def _hashes(x: np.ndarray) -> np.ndarray:
    """64 bits a row: among ten million rows the chance of one false duplicate is about one in 400,000."""
    rows = np.ascontiguousarray(x).reshape(len(x), -1)
    return np.frombuffer(b"".join(hashlib.blake2b(row.data, digest_size=8).digest() for row in rows), np.uint64)


def _duplicates(hashes: dict[str, np.ndarray]) -> dict[tuple[str, str], int]:
    names = [split for split in SPLITS if split in hashes]
    pairs = [(a, b) for place, a in enumerate(names) for b in names[place + 1 :]]
    return {(a, b): int(np.isin(hashes[b], hashes[a]).sum()) for a, b in pairs}


def _of_all_rows(result: Inspection) -> list[str]:
    problems = []
    for split, summary in result.splits.items():
        if summary.bad > MAX_EXAMPLES:
            problems.append(f"{split} has {summary.bad:,} bad rows in all; data.on_bad_row: drop goes on without them")
    train = result.splits.get("train")
    if train is not None and train.rows and (missing := np.flatnonzero(train.labels == 0)).size:
        problems.append(
            f"train has no rows of class {', '.join(map(str, missing.tolist()))}; set data.classes if there are fewer"
        )
    for (a, b), count in result.duplicates.items():
        if count:
            problems.append(f"{count:,} of the rows of {b} are in {a} too, so what is measured on {b} is too good")
    return problems
