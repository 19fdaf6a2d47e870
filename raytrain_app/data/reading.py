"""Reads parts through Ray Data into blocks of checked rows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import ray
from ray.data import DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata

from raytrain_app.data.formats import FORMATS
from raytrain_app.data.parts import Part, Want
from raytrain_app.data.rows import Prepare, check_rows
from raytrain_app.errors import DataError

_EXAMPLES = 5


@dataclass
class Findings:
    """What was found while reading.

    Attributes:
        rows: rows that are good.
        bad: number of bad rows.
        examples: what is wrong with the first of them.
        error: why reading ended early; empty if it did not.
        sha256: of the rows in order.
    """

    rows: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)
    error: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class Read:
    """A block in the object store, the part it is of, what was found while reading it and its labels."""

    ref: ray.ObjectRef[pa.Table]
    part: int
    findings: Findings
    labels: np.ndarray


def good_rows(
    part: Part, want: Want, prepare: Prepare | None, block_rows: int
) -> Iterator[tuple[np.ndarray, np.ndarray, Findings]]:
    """Reads and checks a part; yields its good rows in blocks of exactly `block_rows`, but for the last, with findings."""
    found, pending, held = Findings(), None, 0
    xs: list[np.ndarray] = []
    ys: list[np.ndarray] = []

    def block(rows: int) -> tuple[np.ndarray, np.ndarray, Findings]:
        nonlocal xs, ys, held, found
        x, y = (a[0] if len(a) == 1 else np.concatenate(a) for a in (xs, ys))
        xs, ys, held = [x[rows:]], [y[rows:]], held - rows
        x, y = x[:rows], y[:rows]
        found.rows, found.sha256 = rows, _sha256(x, y)
        done, found = found, Findings()
        return x, y, done

    try:
        for batch in FORMATS[part.format].read(part, want, block_rows):
            checked = check_rows(batch, want, prepare)
            found.bad += len(checked.bad)
            found.examples.extend(list(checked.bad.values())[: _EXAMPLES - len(found.examples)])
            good = np.delete(np.arange(len(checked.y)), list(checked.bad))
            whole = len(good) == len(checked.y)
            xs.append(checked.x if whole else checked.x[good])
            ys.append(checked.y if whole else checked.y[good])
            held += len(good)
            while held >= block_rows:
                if pending is not None:
                    yield pending
                pending = block(block_rows)
    except DataError as error:
        found.error = str(error)
    if held:
        if pending is not None:
            yield pending
        pending = block(held)
    if pending is None:
        pending = (np.empty((0, *want.columns.shape), want.columns.dtype), np.empty(0, np.int64), Findings())
    pending[2].bad += found.bad
    pending[2].examples.extend(found.examples)
    pending[2].error = found.error
    yield pending


def _sha256(x: np.ndarray, y: np.ndarray) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(x).data)
    digest.update(np.ascontiguousarray(y, "<i8").data)
    return digest.hexdigest()


def to_table(x: np.ndarray, y: np.ndarray, part: int, findings: Findings) -> pa.Table:
    """A block as Arrow table; the findings travel in its schema's metadata."""
    x = np.ascontiguousarray(x).reshape(len(x), *(x.shape[1:] or (1,)))
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(x if len(x) else np.zeros((1, *x.shape[1:]), x.dtype)).slice(0, len(x))
    found = {"part": part, "findings": vars(findings)}
    return pa.table({"x": tensor, "y": pa.array(y)}).replace_schema_metadata({"raytrain": json.dumps(found)})


class PartsDatasource(Datasource):
    """Ray Data's view of the parts: one read task each."""

    def __init__(self, parts: Sequence[Part], want: Want, prepare: Prepare | None, block_rows: int) -> None:
        super().__init__()
        self._parts, self._want, self._prepare, self._block_rows = parts, want, prepare, block_rows

    def get_name(self) -> str:
        return "Rows"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        want, prepare, block_rows = self._want, self._prepare, self._block_rows

        def task(number: int, part: Part) -> ReadTask:
            def read() -> Iterator[pa.Table]:
                for x, y, findings in good_rows(part, want, prepare, block_rows):
                    yield to_table(x, y, number, findings)

            return ReadTask(read, BlockMetadata(None, None, None, None))

        return [task(number, part) for number, part in enumerate(self._parts)]


def read_parts(parts: Sequence[Part], want: Want, prepare: Prepare | None, block_rows: int) -> list[Read]:
    """Reads all parts with Ray Data, in order; blocks have `block_rows` rows, but for the last of each part."""
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    # Ray Data cuts a new block as soon as one has more bytes than this, which full blocks have and others have not.
    context.target_max_block_size = block_rows * want.row_bytes - 1
    summarise = ray.remote(num_cpus=0)(_summary)
    with _quiet(), DataContext.current(context):
        rows = ray.data.read_datasource(
            PartsDatasource(parts, want, prepare, block_rows),
            override_num_blocks=len(parts),
            num_cpus=0,
            label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        )
        refs = [entry.ref for bundle in rows.iter_internal_ref_bundles() for entry in bundle.blocks]
        summaries = ray.get([summarise.remote(ref) for ref in refs])
    return [Read(ref, part, Findings(**findings), labels) for ref, (part, findings, labels) in zip(refs, summaries, strict=True)]


def _summary(table: pa.Table) -> tuple[int, dict[str, object], np.ndarray]:
    found = json.loads(table.schema.metadata[b"raytrain"])
    return found["part"], found["findings"], table.column("y").to_numpy()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Ray Data's log lines out of the terminal."""
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
