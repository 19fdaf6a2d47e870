"""From a job to its rows: find the source, read it with Ray Data, check it, split it. Start reading here."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import ray

from raytrain_app.data.blocks import Blocks, Dataset, Split
from raytrain_app.data.checking import MAX_EXAMPLES, Findings, GoodRows, sha256_of
from raytrain_app.data.files import shown
from raytrain_app.data.parts import SPLITS, Batch, Place, Plan, Want
from raytrain_app.data.reading import ReadBlock, read_parts, to_table
from raytrain_app.data.rows import check_rows
from raytrain_app.data.sources import plan_source
from raytrain_app.data.split import hold_out
from raytrain_app.errors import DataError
from raytrain_app.task import Rows, Task

if TYPE_CHECKING:
    from raytrain_app.job import Data, Job

# Few, large blocks: a batch then comes out of one block, in one copy.
_BLOCK_BYTES = 64 << 20
# Blocks of a window of the windowed order. A worker has a window mapped at a time, and a node may have two in its object
# store, the one in use and the one that comes next.
WINDOW_BLOCKS = 8


def load(job: Job, task: Task) -> Dataset:
    """Reads, checks and splits the job's data. Call it in the driver, with Ray up.

    Raises:
        DataError: a file, a row or a column is not what the task expects; the text names it and what to do.
    """
    want = wanted(job.data, task)
    generated = task.generate(job.data.source or task.default_source)
    source = shown(job.data.source or task.default_source)
    if generated is not None:
        plan, blocks = Plan(), _put(generated, want, source)
    else:
        plan = plan_data(job.data, task, want)
        if plan.problems:
            raise DataError("\n".join(plan.problems))
        blocks = read_parts(plan.parts, want, task.prepare if want.raw else None)
    dropped = refuse_bad([block.findings for block in blocks], drop=job.data.on_bad_row == "drop")
    train, held_out, test = ([block for block in blocks if block.split == split] for split in SPLITS)
    return _dataset(job, want, source, train, held_out, test, plan.notes, dropped)


def check(job: Job, task: Task) -> list[str]:
    """What is wrong with the job's data, as far as names and headers tell: without Ray, and without downloading anything."""
    if task.generate(job.data.source or task.default_source) is not None:
        return []
    try:
        return plan_data(job.data, task, wanted(job.data, task), download=False).problems
    except DataError as error:
        return [str(error)]


def wanted(data: Data, task: Task) -> Want:
    """What the rows must look like.

    Raises:
        DataError: the task's columns and the job's options do not go together.
    """
    columns = dataclasses.replace(task.columns, num_classes=data.classes or task.columns.num_classes)
    if np.dtype(columns.dtype).kind not in "uif":
        raise DataError(f"the task's columns have the dtype {columns.dtype}; expected whole numbers or floats, such as uint8")
    if data.transpose and (len(columns.shape) < 2 or columns.shape[0] != columns.shape[1]):
        raise DataError(f"data.transpose: found rows of shape {columns.shape}; expected square images")
    want = Want(
        columns,
        transpose=data.transpose,
        label_offset=data.label_offset,
        one_hot=data.one_hot,
        raw=type(task).prepare is not Task.prepare,
        allow_modified=data.allow_modified,
    )
    block_bytes = (data.window_mib << 20) // WINDOW_BLOCKS if data.order == "windowed" else _BLOCK_BYTES
    block_rows = max(1, block_bytes // want.row_bytes)
    return dataclasses.replace(want, block_rows=block_rows, part_rows=block_rows * max(1, _BLOCK_BYTES // block_bytes))


def plan_data(data: Data, task: Task, want: Want, download: bool = True) -> Plan:
    """What is to be read for a job's `data` section, after checking all that names and headers tell."""
    plan = plan_source(data.source or task.default_source, data.format, want, offline=data.offline, download=download)
    if data.test_source is not None:
        test = plan_source(data.test_source, "auto", want, offline=data.offline, download=download, as_test=True)
        plan.parts = [part for part in plan.parts if part.split != "test"] + test.parts
        plan.problems += test.problems
        plan.notes += test.notes
    return plan


def _put(generated: Mapping[str, Rows], want: Want, source: str) -> list[ReadBlock]:
    """Puts the rows that a task makes itself into the object store, checked like all others."""
    blocks = []
    for split, (x, y) in generated.items():
        columns = {want.columns.x_names[0]: x, want.columns.y_names[0]: y}
        checked = check_rows(Batch(columns, Place(f"{source}, generated {split} rows", range(len(y)))), want)
        if checked.bad:
            raise DataError("\n".join(list(checked.bad.values())[:MAX_EXAMPLES]))
        for first in range(0, len(y), want.block_rows):
            x_block, y_block = checked.x[first : first + want.block_rows], checked.y[first : first + want.block_rows]
            findings = Findings(rows=len(y_block), sha256=sha256_of(x_block, y_block))
            blocks.append(ReadBlock(ray.put(to_table(GoodRows(x_block, y_block, findings))), split, findings, y_block))
    return blocks


def refuse_bad(findings: Sequence[Findings], drop: bool) -> tuple[int, list[str]]:
    """Raises for damaged files and, unless they may be dropped, for bad rows; the number of those dropped, and the first."""
    errors = list(dict.fromkeys(found.error for found in findings if found.error))
    if errors:
        raise DataError("\n".join(errors))
    bad = sum(found.bad for found in findings)
    examples = [text for found in findings for text in found.examples][:MAX_EXAMPLES]
    if bad and not drop:
        more = f"\n... and {bad - len(examples):,} more bad rows" if bad > len(examples) else ""
        raise DataError("\n".join(examples) + more + "\nCorrect these rows, or set data.on_bad_row: drop to go on without them")
    return bad, examples


def _dataset(
    job: Job,
    want: Want,
    source: str,
    train: Sequence[ReadBlock],
    held_out: Sequence[ReadBlock],
    test: Sequence[ReadBlock],
    notes: Sequence[str],
    dropped: tuple[int, list[str]],
) -> Dataset:
    blocks, labels, fingerprint = _joined([train, held_out, test], want, windowed=job.data.order == "windowed")
    _check_labels(labels[0], want, source)
    notes = list(notes)
    if dropped[0]:
        notes.append(f"{dropped[0]:,} bad rows were dropped, the first of them: {dropped[1][0]}")
    kept, held = hold_out(labels[0], 0 if held_out else job.data.validation_fraction, job.train.seed)
    if held_out:
        validation: Split | None = Split(blocks[1], np.arange(blocks[1].num_rows))
        notes.append(f"{source} has its own {blocks[1].num_rows:,} validation rows, so data.validation_fraction is not used")
    else:
        validation = Split(blocks[0], held) if len(held) else None
    if not test:
        notes.append(f"{source} has no test rows, so there will be no test metrics; data.test_source can name some")
    if store := _too_large(blocks, want, job.data.order):
        notes.append(store)
    _check_sizes(job, len(kept), len(held), bool(held_out))
    return Dataset(
        train=Split(blocks[0], kept),
        validation=validation,
        test=Split(blocks[2], np.arange(blocks[2].num_rows)) if test else None,
        notes=tuple(notes),
        fingerprint=fingerprint,
        dropped=dropped[0],
    )


def _joined(splits: Sequence[Sequence[ReadBlock]], want: Want, windowed: bool) -> tuple[list[Blocks], list[np.ndarray], str]:
    """The blocks and labels of each split, and a checksum of everything."""
    digest = hashlib.sha256(repr((want.columns.shape, want.columns.dtype)).encode())
    all_blocks, all_labels = [], []
    for split, read in zip(SPLITS, splits, strict=True):
        filled = [block for block in read if block.findings.rows]
        digest.update(f"{split}:{''.join(block.findings.sha256 for block in filled)}".encode())
        starts = np.cumsum([0] + [block.findings.rows for block in filled])
        window = WINDOW_BLOCKS if windowed else 0
        refs = tuple(block.ref for block in filled)
        all_blocks.append(Blocks(refs, tuple(starts.tolist()), want.columns.shape, want.columns.dtype, window))
        all_labels.append(np.concatenate([block.labels for block in filled] or [np.empty(0, np.int64)]))
    return all_blocks, all_labels, digest.hexdigest()


def _check_labels(labels: np.ndarray, want: Want, source: str) -> None:
    if not len(labels):
        raise DataError(f"data.source: {source} has no rows for training")
    low, high = want.labels
    missing = np.flatnonzero(np.bincount(labels, minlength=want.columns.num_classes) == 0) + low
    if len(missing):
        shown = ", ".join(map(str, missing[:10].tolist())) + (", ..." if len(missing) > 10 else "")
        raise DataError(
            f"data.source: {source} has no training rows of class {shown}; expected rows of all classes {low}..{high}; add such "
            "rows, or set data.classes to the number of classes that there are"
        )


def _check_sizes(job: Job, train: int, held: int, own_validation: bool) -> None:
    batch, shards, fraction = job.train.global_batch_size, job.num_shards, job.data.validation_fraction
    if train < max(batch, shards):
        key, least = ("train.virtual_shards", shards) if shards > batch else ("train.global_batch_size", batch)
        raise DataError(
            f"there are {train:,} training rows (and {held:,} held out for validation), fewer than {key}: {least:,}; expected at "
            "least as many; make it smaller or bring more rows"
        )
    if fraction and not held and not own_validation:
        raise DataError(
            f"data.validation_fraction: {fraction:g} of {train:,} rows is less than one row; expected one or more; make it "
            "larger, or 0 to have no validation"
        )


def _too_large(blocks: Sequence[Blocks], want: Want, order: str) -> str | None:
    size = sum(split.num_rows for split in blocks) * want.row_bytes
    here = ray.get_runtime_context().get_node_id()
    room = next(node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["NodeID"] == here)
    if order == "windowed" or size <= 0.8 * room:
        return None
    return (
        f"the data has {size >> 20:,} MiB and this node's object store {int(room) >> 20:,} MiB, so rows will be read back from "
        "disk again and again; data.order: windowed reads each block once an epoch"
    )
