"""One split of a job's rows, for whoever uses a trained model: read in this process, or by the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raytrain_app.data.blocks import Blocks, Split
from raytrain_app.data.checking import MAX_EXAMPLES, Findings, good_rows
from raytrain_app.data.load import plan_data, refuse_bad, wanted
from raytrain_app.data.parts import SPLITS, Batch, Part, Place, Want
from raytrain_app.data.reading import read_parts
from raytrain_app.data.rows import check_rows
from raytrain_app.data.sources import plan_source
from raytrain_app.data.split import hold_out
from raytrain_app.errors import DataError
from raytrain_app.task import Rows, Task

if TYPE_CHECKING:
    from raytrain_app.job import Job


def read_split(job: Job, task: Task, split: str, source: str | None = None) -> Rows:
    """The rows of a split, read in this process; in the order in which training has them.

    Args:
        job: says where the rows are and which are held out.
        task: says what they look like.
        split: "train", "validation" or "test".
        source: rows of another source instead, all of them where it does not speak of splits.

    Returns:
        x of shape (rows, *shape) in the stored dtype and y int64 of shape (rows,).

    Raises:
        DataError: there are no such rows, or something is wrong with them.
    """
    generated = task.generate(source or job.data.source or task.default_source)
    if generated is not None:
        want, held_out = wanted(job.data, task), split != "test"  # a task makes no validation rows of its own
        x, y = _generated(generated, "train" if held_out else split, want)
    else:
        plan = _plan(job, task, split, source)
        prepare, want, held_out = (task.prepare if plan.want.raw else None), plan.want, plan.held_out
        blocks = [rows for part in plan.parts for rows in good_rows(part, want, prepare)]
        _refuse(job, [rows.findings for rows in blocks])
        x, y = np.concatenate([rows.x for rows in blocks]), np.concatenate([rows.y for rows in blocks])
    if not held_out:
        return x, y
    ids = _ids(job, split, y, held_out)
    return x[ids], y[ids]


def load_split(job: Job, task: Task, split: str, source: str | None = None) -> Split:
    """The same rows in the cluster's object store, read by Ray Data. Call it in the driver, with Ray up.

    Raises:
        DataError: there are no such rows, or something is wrong with them.
    """
    import ray

    if task.generate(source or job.data.source or task.default_source) is not None:
        raise DataError("a task that makes its own rows is evaluated in this process; leave --workers out")
    plan = _plan(job, task, split, source)
    blocks = read_parts(plan.parts, plan.want, task.prepare if plan.want.raw else None)
    _refuse(job, [block.findings for block in blocks])
    filled = [block for block in blocks if block.findings.rows]
    starts = np.cumsum([0] + [block.findings.rows for block in filled]).tolist()
    refs: tuple[ray.ObjectRef[object], ...] = tuple(block.ref for block in filled)
    labels = np.concatenate([block.labels for block in filled])
    columns = plan.want.columns
    return Split(Blocks(refs, tuple(starts), columns.shape, columns.dtype), _ids(job, split, labels, plan.held_out))


def size_bytes(job: Job, task: Task, split: str) -> int:
    """Bytes of the files that have the rows of a split, as they are stored; 0 where the task makes them itself.

    Raises:
        DataError: there are no such rows.
    """
    if task.generate(job.data.source or task.default_source) is not None:
        return 0
    files = {file.name: file.size for part in _plan(job, task, split, None).parts for file in part.files}
    return sum(files.values())


@dataclass(frozen=True)
class _Plan:
    """What to read. `held_out`: the validation rows are among the training rows."""

    want: Want
    parts: tuple[Part, ...]
    held_out: bool


def _plan(job: Job, task: Task, split: str, source: str | None) -> _Plan:
    want = wanted(job.data, task)
    if source is None:
        plan = plan_data(job.data, task, want)
    else:
        plan = plan_source(source, "auto", want, offline=job.data.offline, as_test=True)
        split = "test"
    if plan.problems:
        raise DataError("\n".join(plan.problems))
    there = [name for name in SPLITS if any(part.split == name for part in plan.parts)]
    held_out = split != "test" and "validation" not in there
    wanted_split = "train" if held_out else split
    parts = tuple(part for part in plan.parts if part.split == wanted_split)
    if not parts:
        raise DataError(
            f"{source or job.data.source or task.default_source} has no {split} rows, only {' and '.join(there)} rows; "
            "choose another --split, or name rows with --source"
        )
    return _Plan(want, parts, held_out)


def _generated(rows: Mapping[str, Rows], split: str, want: Want) -> Rows:
    if split not in rows:
        raise DataError(f"the task makes no {split} rows; choose another --split")
    x, y = rows[split]
    columns = {want.columns.x_names[0]: x, want.columns.y_names[0]: y}
    checked = check_rows(Batch(columns, Place(f"generated {split} rows", range(len(y)))), want)
    if checked.bad:
        raise DataError("\n".join(list(checked.bad.values())[:MAX_EXAMPLES]))
    return checked.x, checked.y


def _refuse(job: Job, findings: list[Findings]) -> None:
    refuse_bad(findings, drop=job.data.on_bad_row == "drop")


def _ids(job: Job, split: str, labels: np.ndarray, held_out: bool) -> np.ndarray:
    """Row numbers of the split among the rows read."""
    if not held_out:
        return np.arange(len(labels))
    kept, held = hold_out(labels, job.data.validation_fraction, job.train.seed)
    ids = held if split == "validation" else kept
    if not len(ids):
        raise DataError(f"the job holds out no validation rows (data.validation_fraction: {job.data.validation_fraction:g})")
    return ids
