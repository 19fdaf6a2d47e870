"""Parquet: an image column (flat or nested lists, tensors, or encoded images as Hugging Face has them) and a label column."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raytrain_app.data.files import File, damage
from raytrain_app.data.formats.pixels import Layout, layout
from raytrain_app.data.parts import SPLITS, Batch, Part, Place, Plan, Want, split_of
from raytrain_app.errors import DataError

_SPLIT_COLUMN = "split"


def recognises(file: File, head: bytes) -> bool:
    return head[:4] == b"PAR1" or file.inside.lower().endswith((".parquet", ".pq"))


def plan(files: Sequence[File], want: Want) -> Plan:
    plan = Plan()
    first: tuple[File, dict[str, str]] | None = None
    for file in files:
        try:
            with _opened(file) as parquet:
                schema = parquet.schema_arrow
                if doubled := sorted({name for name in schema.names if schema.names.count(name) > 1}):
                    raise DataError(f"{file.name} has several columns named {doubled[0]!r}; expected a name for each")
                columns = schema.names if want.raw else _used_columns(file, schema, want)
                types = {name: str(schema.field(name).type) for name in columns}
                if first is not None and types != first[1]:
                    raise DataError(_differs(file, types, *first))
                first = first or (file, types)
                splits = _splits(file, parquet, len(files) > 1)
                groups = _group_ranges(parquet, want.part_rows)
        except DataError as error:
            plan.problems.append(str(error))
            continue
        # The rows before each range of row groups give the row numbers that a user can look up.
        plan.parts += [
            Part(split, "parquet", (file,), start, where=(str(low), str(high), value))
            for split, value in splits
            for low, high, start in groups
        ]
    return plan


def read(part: Part, want: Want) -> Iterator[Batch]:
    (file,) = part.files
    low, high, value = part.where
    with _opened(file) as parquet:
        schema = parquet.schema_arrow
        names = schema.names if want.raw else _used_columns(file, schema, want)
        if value and _SPLIT_COLUMN not in names:
            names = [*names, _SPLIT_COLUMN]
        place = part.start
        groups = list(range(int(low), int(high)))
        for batch in parquet.iter_batches(want.block_rows, row_groups=groups, columns=names, use_threads=False):
            table, numbers = pa.table(batch), np.arange(place, place + len(batch))
            place += len(batch)
            if value:
                mine = table[_SPLIT_COLUMN].to_numpy() == value
                table, numbers = table.filter(pa.array(mine)), numbers[mine]
            if len(table):
                yield _batch(file, table, numbers, want)


def _batch(file: File, table: pa.Table, numbers: np.ndarray, want: Want) -> Batch:
    columns = {name: to_numpy(table[name].combine_chunks()) for name in table.column_names}
    found = None if want.raw else _pixel_columns(table.schema, want)
    if isinstance(found, Layout):
        arrays = [columns[name] for name in table.schema.names if name != _SPLIT_COLUMN]
        labels = [arrays[place] for place in found.labels]
        image = np.stack([arrays[place] for place in found.pixels], axis=1)
        columns = {"image": image, "label": labels[0] if len(labels) == 1 else np.stack(labels, axis=1)}
    return Batch(columns, Place(file.name, numbers))


def to_numpy(array: pa.Array) -> np.ndarray:
    """An Arrow array with one entry a row: numbers as they are, equal lists as more dimensions, all else as objects."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array.type, pa.FixedShapeTensorType):
        return np.asarray(array.to_numpy_ndarray())
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_struct(array.type):
        names = [array.type.field(place).name for place in range(array.type.num_fields)]
        if "data" in names and "shape" in names:  # the storage of Ray's tensors of varying shape
            return _objects(array.field("data").to_pylist())
        return _objects(array.field("bytes").to_pylist()) if "bytes" in names else _objects(array.to_pylist())
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        return _lists(array)
    if pa.types.is_dictionary(array.type):
        return to_numpy(array.dictionary_decode())
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _lists(array: pa.Array) -> np.ndarray:
    lengths = pc.list_value_length(array)
    length = lengths[0].as_py() if len(array) else 0
    if array.null_count or not length or pc.any(pc.not_equal(lengths, length)).as_py():
        return _objects(array.to_pylist())
    values = to_numpy(array.flatten())
    return values.reshape(len(array), length, *values.shape[1:])


def _objects(values: list[object]) -> np.ndarray:
    array = np.empty(len(values), object)
    for place, value in enumerate(values):
        array[place] = value
    return array


@contextlib.contextmanager
def _opened(file: File) -> Iterator[pq.ParquetFile]:
    if nonsense := file.nonsense():
        raise DataError(nonsense)
    with damage(file), file.open() as stream:
        stream.seek(max(0, file.size - 4))
        end = stream.read(4)
        if end != b"PAR1":
            raise DataError(
                f"{file.name} is cut off or no Parquet file: its last bytes are {end.hex(' ')}; expected 50 41 52 31 (PAR1); "
                "get it again"
            )
        yield pq.ParquetFile(stream, page_checksum_verification=True)


def _used_columns(file: File, schema: pa.Schema, want: Want) -> list[str]:
    """The columns to read, in the order of the file."""
    x, y = (
        next((name for name in names if name in schema.names), None) for names in (want.columns.x_names, want.columns.y_names)
    )
    if x and y:
        return [name for name in schema.names if name in (x, y)]
    found = _pixel_columns(schema, want)
    if isinstance(found, Layout):
        return [name for name in schema.names if name != _SPLIT_COLUMN]
    names = ", ".join(schema.names[:8]) + (", ..." if len(schema.names) > 8 else "")
    missing, accepted = ("label", want.columns.y_names) if x else ("image", want.columns.x_names)
    raise DataError(
        f"{file.name} has no {missing} column: found columns {names}; expected one named {' or '.join(accepted)}; rename it, or "
        "override the task's prepare"
    )


def _pixel_columns(schema: pa.Schema, want: Want) -> Layout | str:
    if any(name in schema.names for name in want.columns.x_names):
        return "has its pixels in one column"
    names = [name for name in schema.names if name != _SPLIT_COLUMN]
    return layout(names, len(names), want)


def _splits(file: File, parquet: pq.ParquetFile, several_files: bool) -> list[tuple[str, str]]:
    """The splits that the file has rows of, each with its value in the split column, which is empty without such a column."""
    if _SPLIT_COLUMN not in parquet.schema_arrow.names:
        return [((split_of(file.inside) or "train") if several_files else "train", "")]
    values = parquet.read(columns=[_SPLIT_COLUMN], use_threads=False)[_SPLIT_COLUMN].unique().to_pylist()
    splits = []
    for value in values:
        split = split_of(str(value))
        if split is None:
            raise DataError(f"{file.name}: column {_SPLIT_COLUMN} has the value {value!r}; expected {', '.join(SPLITS)}")
        splits.append((split, str(value)))
    return splits


def _group_ranges(parquet: pq.ParquetFile, part_rows: int) -> list[tuple[int, int, int]]:
    """Runs of row groups of at most `part_rows` rows (or one group): first group, group to stop before, first row."""
    sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.metadata.num_row_groups)]
    ranges: list[tuple[int, int, int]] = []
    row = held = 0
    for group, size in enumerate(sizes):
        if ranges and held + size <= part_rows:
            ranges[-1] = (ranges[-1][0], group + 1, ranges[-1][2])
            held += size
        else:
            ranges.append((group, group + 1, row))
            held = size
        row += size
    return ranges


def _differs(file: File, types: dict[str, str], first: File, expected: dict[str, str]) -> str:
    for name, type_ in expected.items():
        if name not in types:
            return f"{file.name} has no column {name}: found {', '.join(types)}; expected {name}, as in {first.name}; rename it"
        if types[name] != type_:
            return (
                f"{file.name}: column {name} has the type {types[name]}; expected {type_}, as in {first.name}; write all files "
                "with the same types"
            )
    return f"{file.name} has the columns {', '.join(types)}; expected {', '.join(expected)}, as in {first.name}"
