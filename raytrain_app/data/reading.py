"""Reads parts, with Ray Data unless they are small, into blocks of checked rows in the object store."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata

from raytrain_app.data.checking import Findings, GoodRows, good_rows
from raytrain_app.data.parts import Part, Want
from raytrain_app.data.rows import Prepare

_METADATA = b"raytrain"
_SMALL_BYTES, _FEW_FILES = 64 << 20, 64
"""Local files up to here are read before the processes that Ray Data needs have started."""


@dataclass(frozen=True)
class ReadBlock:
    """A block in the object store: its split, what was found while it was read, and its labels."""

    ref: ray.ObjectRef[pa.Table]
    split: str
    findings: Findings
    labels: np.ndarray


def read_parts(parts: Sequence[Part], want: Want, prepare: Prepare | None) -> list[ReadBlock]:
    """Reads all parts; the blocks come in the order of the parts and of the rows in them.

    Local files are read on this machine, since other nodes may not have them; files in buckets are read by any node, and
    again if that node and its blocks are lost. Reading takes no CPUs from Ray: workers may hold all of them by then.

    Raises:
        ray.exceptions.RayError: Ray failed; what is wrong with the data is in the findings instead.
    """
    files = {file.name: file for part in parts for file in part.files}.values()
    small = len(files) <= _FEW_FILES and sum(file.size for file in files) <= _SMALL_BYTES
    if small and prepare is None and not any(file.uri for file in files):
        return [
            ReadBlock(ray.put(to_table(rows, number)), part.split, rows.findings, rows.y.copy())
            for number, part in enumerate(parts)
            for rows in good_rows(part, want)
        ]
    return _read_with_ray_data(parts, want, prepare)


def _read_with_ray_data(parts: Sequence[Part], want: Want, prepare: Prepare | None) -> list[ReadBlock]:
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    # Ray Data ends a block as soon as it has more bytes than this, which our full blocks have and smaller ones have not:
    # so its blocks are ours, and the windowed order, which goes by blocks, is the same on every cluster.
    context.target_max_block_size = want.block_rows * want.row_bytes - 1
    anywhere = any(file.uri for part in parts for file in part.files)
    cpus = int(ray.cluster_resources().get("CPU", 0)) if anywhere else os.cpu_count()
    place = {} if anywhere else {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    summarise = ray.remote(num_cpus=0)(_summary)
    blocks = []
    with _quiet(), DataContext.current(context):
        rows = ray.data.read_datasource(
            _PartsDatasource(parts, want, prepare),
            override_num_blocks=len(parts),
            num_cpus=0,
            # A second process takes longer to start than it takes to read a few parts.
            concurrency=max(1, min(len(parts) // 2, cpus or 1)),
            label_selector=place,
        )
        for bundle in rows.iter_internal_ref_bundles():
            for entry in bundle.blocks:
                # At once, while the block is in memory, and where it is: a block on another node is not brought here.
                number, found, labels = ray.get(summarise.remote(entry.ref)) if anywhere else _summary(ray.get(entry.ref))
                blocks.append(ReadBlock(entry.ref, parts[number].split, Findings(**found), labels))
    return blocks


def to_table(rows: GoodRows, part: int = 0) -> pa.Table:
    """A block as Arrow table, with columns `x` (fixed shape tensor) and `y`, and the findings in its schema's metadata."""
    x = rows.x.reshape(len(rows.x), *(rows.x.shape[1:] or (1,)))
    # Arrow makes no tensor array of no rows, but a slice of one may have none.
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(x if len(x) else np.zeros((1, *x.shape[1:]), x.dtype)).slice(0, len(x))
    metadata = {_METADATA: json.dumps([part, vars(rows.findings)])}
    return pa.table({"x": tensor, "y": pa.array(rows.y)}).replace_schema_metadata(metadata)


def _summary(table: pa.Table) -> tuple[int, dict[str, Any], np.ndarray]:
    """The part, the findings and a copy of the labels, so that the block itself may leave memory."""
    part, found = json.loads(table.schema.metadata[_METADATA])
    return part, found, table.column("y").to_numpy().copy()


class _PartsDatasource(Datasource):
    """Ray Data's view of parts: a read task each."""

    def __init__(self, parts: Sequence[Part], want: Want, prepare: Prepare | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parts, self._want, self._prepare = parts, want, prepare

    def get_name(self) -> str:
        return "Rows"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        return [
            ReadTask(_Read(number, part, self._want, self._prepare), BlockMetadata(None, None, None, None))
            for number, part in enumerate(self._parts)
        ]


@dataclass(frozen=True)
class _Read:
    """What a read task does, as a value that can be pickled."""

    number: int
    part: Part
    want: Want
    prepare: Prepare | None

    __name__ = "read"

    def __call__(self) -> Iterator[pa.Table]:
        for rows in good_rows(self.part, self.want, self.prepare):
            yield to_table(rows, self.number)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Ray Data's log lines out of the terminal; what fails is raised anyway."""
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
