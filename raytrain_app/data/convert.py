"""Any source to one Parquet file that needs no options to be read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_app.data.checking import MAX_EXAMPLES, good_rows
from raytrain_app.data.files import first_line
from raytrain_app.data.load import plan_data, wanted
from raytrain_app.errors import DataError
from raytrain_app.task import Task

if TYPE_CHECKING:
    from raytrain_app.job import Data

_GROUP_ROWS = 8192


def convert(data: Data, task: Task, out: Path) -> tuple[dict[str, int], int]:
    """Writes all rows that a job's `data` section names, checked and in the task's form, to one Parquet file.

    The file has the columns `image` (a flat list of equal length), `label` (class numbers from 0) and `split`. It gets its
    name when it is complete.

    Args:
        data: what to read and how.
        task: its columns say what the rows must look like.
        out: the file to write; it must not exist.

    Returns:
        Rows written for each split, and the number of bad rows dropped.

    Raises:
        DataError: the source has problems, or the file cannot be written; then there is no file.
    """
    if out.exists():
        raise DataError(f"{out} exists already; delete it, or write to another file")
    if not out.absolute().parent.is_dir():
        raise DataError(f"the folder of {out} does not exist; make it first")
    want = wanted(data, task)
    plan = plan_data(data, task, want)
    if plan.problems:
        raise DataError("\n".join(plan.problems))
    values = pa.list_(pa.from_numpy_dtype(np.dtype(want.columns.dtype)), want.row_size)
    schema = pa.schema([("image", values), ("label", pa.int64()), ("split", pa.string())])
    part_file = out.with_name(f".{out.name}.part")
    written: dict[str, int] = {}
    bad, examples = 0, list[str]()
    try:
        with pq.ParquetWriter(part_file, schema, compression="zstd", write_page_checksum=True) as writer:
            for part in plan.parts:
                for rows in good_rows(part, want, task.prepare if want.raw else None):
                    if rows.findings.error:
                        raise DataError(rows.findings.error)
                    bad += rows.findings.bad
                    examples += rows.findings.examples
                    image = pa.FixedSizeListArray.from_arrays(pa.array(rows.x.ravel()), want.row_size)
                    table = pa.table([image, pa.array(rows.y), pa.array([part.split] * len(rows.y))], schema=schema)
                    writer.write_table(table, row_group_size=_GROUP_ROWS)
                    written[part.split] = written.get(part.split, 0) + len(rows.y)
        if bad and data.on_bad_row == "fail":
            more = f"\n... and {bad - MAX_EXAMPLES:,} more bad rows" if bad > MAX_EXAMPLES else ""
            raise DataError("\n".join(examples[:MAX_EXAMPLES]) + more + "\nCorrect these rows, or leave them out with --drop")
        os.replace(part_file, out)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {first_line(error)}") from None
    finally:
        part_file.unlink(missing_ok=True)
    return written, bad
