"""Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raytrain_app.data.files import File
from raytrain_app.data.parts import Batch, Part, Place, Want


def recognises(file: File) -> bool:
    return file.head(4) == b"PAR1"


def plan(files: Sequence[File], want: Want) -> list[Part]:
    return [Part(split, "parquet", (file,), where=(split,)) for split in ("train", "test") for file in files]


def read(part: Part, want: Want, batch_rows: int) -> Iterator[Batch]:
    with part.files[0].open() as stream:
        table = pq.read_table(stream)
    table = table.filter(pc.equal(table["split"], part.where[0])).drop_columns(["split"]).combine_chunks()
    for first in range(0, len(table), batch_rows):
        chunk = table.slice(first, batch_rows)
        yield Batch({name: _numpy(chunk[name].combine_chunks()) for name in chunk.column_names}, Place(part.files[0].name, first))


def _numpy(array: pa.Array) -> np.ndarray:
    if pa.types.is_fixed_size_list(array.type):
        return array.flatten().to_numpy().reshape(len(array), -1)
    return array.to_numpy(zero_copy_only=False)
