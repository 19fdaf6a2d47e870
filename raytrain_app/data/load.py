"""From a job to its rows: find the source, read it through Ray Data, check it, split it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import ray

from raytrain_app.data.blocks import Blocks, Dataset, Split
from raytrain_app.data.files import find_files
from raytrain_app.data.formats import FORMATS
from raytrain_app.data.parts import Batch, Part, Place, Want
from raytrain_app.data.reading import Findings, Read, read_parts, to_table
from raytrain_app.data.rows import check_rows
from raytrain_app.data.split import hold_out
from raytrain_app.errors import DataError
from raytrain_app.task import Rows, Task

if TYPE_CHECKING:
    from raytrain_app.job import Job

_BLOCK_BYTES = 64 << 20
_EMBEDDED = os.path.join(os.path.dirname(__file__), "embedded", "mnist-10k.parquet")


def load(job: Job, task: Task) -> Dataset:
    """Reads, checks and splits the job's data. Call it in the driver, with Ray up and before workers take its CPUs.

    Raises:
        DataError: a file or a row is not what the task expects.
    """
    columns = dataclasses.replace(task.columns, num_classes=job.data.classes or task.columns.num_classes)
    want = Want(columns, transpose=job.data.transpose, label_offset=job.data.label_offset)
    block_rows = max(1, _BLOCK_BYTES // want.row_bytes)
    source = job.data.source or task.default_source
    generated = task.generate(source)
    if generated is not None:
        read = _put(generated, want, block_rows, source)
    else:
        prepare = None if type(task).prepare is Task.prepare else task.prepare
        parts = _plan(_EMBEDDED if source == "mnist-sample" else source, want)
        blocks = read_parts(parts, want, prepare, block_rows)
        read = {split: [b for b in blocks if parts[b.part].split == split] for split in ("train", "test")}
    for block in read["train"] + read["test"]:
        if block.findings.error or block.findings.bad:
            raise DataError(block.findings.error or "\n".join(block.findings.examples))
    train_blocks, labels, digest = _blocks(read["train"], want)
    kept, held = hold_out(labels, job.data.validation_fraction, job.train.seed)
    test_blocks, test_labels, test_digest = _blocks(read["test"], want)
    return Dataset(
        train=Split(train_blocks, kept),
        validation=Split(train_blocks, held) if len(held) else None,
        test=Split(test_blocks, np.arange(len(test_labels))) if len(test_labels) else None,
        notes=() if len(test_labels) else (f"{source} has no test rows, so there will be no test metrics",),
        fingerprint=hashlib.sha256((digest + test_digest).encode()).hexdigest(),
    )


def check(job: Job, task: Task) -> list[str]:
    """Everything wrong with the job's data that can be found without Ray and without reading whole files."""
    return []


def _plan(source: str, want: Want) -> list[Part]:
    files = find_files(source)
    for format_ in FORMATS.values():
        mine = [file for file in files if format_.recognises(file)]
        if mine:
            return format_.plan(mine, want)
    raise DataError(f"{source}: found no data")


def _put(generated: Mapping[str, Rows], want: Want, block_rows: int, source: str) -> dict[str, list[Read]]:
    read: dict[str, list[Read]] = {"train": [], "test": []}
    for split, (x, y) in generated.items():
        checked = check_rows(Batch({want.columns.x_names[0]: x, want.columns.y_names[0]: y}, Place(source)), want)
        for first in range(0, len(x), block_rows):
            rows = slice(first, first + block_rows)
            findings = Findings(rows=len(checked.y[rows]), sha256=hashlib.sha256(checked.x[rows].tobytes()).hexdigest())
            ref = ray.put(to_table(checked.x[rows], checked.y[rows], 0, findings))
            read[split].append(Read(ref, 0, findings, checked.y[rows]))
    return read


def _blocks(read: list[Read], want: Want) -> tuple[Blocks, np.ndarray, str]:
    read = [block for block in read if block.findings.rows]
    starts = np.cumsum([0] + [block.findings.rows for block in read])
    blocks = Blocks(tuple(b.ref for b in read), tuple(starts.tolist()), want.columns.shape, want.columns.dtype)
    labels = np.concatenate([b.labels for b in read]) if read else np.empty(0, np.int64)
    return blocks, labels, "".join(b.findings.sha256 for b in read)
