"""CSV: a label and one column a pixel, with or without a header; or a task's own columns, with a header."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pa_csv

from raytrain_app.data.files import GZIP, File, damage
from raytrain_app.data.formats.pixels import Layout, layout
from raytrain_app.data.parts import Batch, Part, Place, Plan, Want, split_of
from raytrain_app.errors import DataError

_SNIFF_BYTES = 1 << 20
_QUESTION_MARKS = bytes(range(128)) + b"?" * 128
_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")


@dataclass(frozen=True)
class _Sniffed:
    delimiter: str
    header: tuple[str, ...] | None
    header_lines: int
    width: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.header or tuple(f"column {number}" for number in range(1, self.width + 1))


def recognises(file: File, head: bytes) -> bool:
    if file.inside.lower().endswith(_SUFFIXES):
        return True
    if head[:2] == GZIP:
        head = file.head(64, unpack=True)
    return bool(head) and b"," in head and all(byte in b"0123456789.,-+eE \"'\r\n" for byte in head)


def plan(files: Sequence[File], want: Want) -> Plan:
    plan = Plan()
    first: tuple[File, tuple[str, ...]] | None = None
    for file in files:
        split = (split_of(file.inside) or "train") if len(files) > 1 else "train"
        try:
            sniffed = _sniff(file, want)
        except DataError as error:
            plan.problems.append(str(error))
            continue
        if want.raw:
            if sniffed.header is None:
                plan.problems.append(f"{file.name} has no header line; the task's prepare needs columns with names")
                continue
            if doubled := sorted({name for name in sniffed.header if sniffed.header.count(name) > 1}):
                plan.problems.append(f"{file.name} has several columns named {doubled[0]!r}; expected a name for each")
                continue
        else:
            found = layout(sniffed.header, sniffed.width, want)
            if isinstance(found, str):
                if split == "test" and sniffed.width == want.row_size:
                    plan.notes.append(f"{file.name} has no label column, so it is not used for testing")
                else:
                    plan.problems.append(f"{file.name} {found}")
                continue
        if sniffed.header is not None:
            if first and first[1] != sniffed.header:
                plan.problems.append(_renamed(file, sniffed.header, *first))
                continue
            first = first or (file, sniffed.header)
        plan.parts.append(Part(split, "csv", (file,)))
    return plan


def read(part: Part, want: Want) -> Iterator[Batch]:
    (file,) = part.files
    sniffed = _sniff(file, want)
    if want.raw:
        yield from _read_own(file, sniffed)
        return
    found = layout(sniffed.header, sniffed.width, want)
    if isinstance(found, str):
        raise DataError(f"{file.name} {found}")
    done = 0
    reported: set[str] = set()
    with damage(file):
        try:
            for piece in _tables(file, sniffed, want, _column_types(sniffed, found, want)):
                reported.update(piece.lost)
                yield _as_numbers(file, sniffed, found, piece)
                done += len(piece.table)
        except pa.ArrowInvalid:
            # Some field is no number. Reading the rest as text finds out which ones, row by row.
            for batch in _read_text(file, sniffed, found, want, done):
                batch.lost = [text for text in batch.lost if text not in reported]
                yield batch


@dataclass
class _Lines:
    """A piece of the file as a table, the line number of each of its rows, and the lines that do not fit the table."""

    table: pa.Table
    lines: np.ndarray
    lost: list[str] = field(default_factory=list)


def _tables(file: File, sniffed: _Sniffed, want: Want, types: dict[str, pa.DataType]) -> Iterator[_Lines]:
    skipped: list[int] = []
    lost: list[str] = []

    def wrong_width(row: pa_csv.InvalidRow) -> str:
        skipped.append(row.number)
        if row.text.strip():
            lost.append(f"{file.name}, line {row.number}: found {row.actual_columns} columns; expected {row.expected_columns}")
        return "skip"

    names = [str(place) for place in range(sniffed.width)]
    with file.unpacked() as stream:
        if stream.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            stream.seek(0)
        reader = pa_csv.open_csv(
            _Ascii(stream),
            pa_csv.ReadOptions(
                use_threads=False, skip_rows=sniffed.header_lines, column_names=names, block_size=max(1 << 20, 64 * want.row_size)
            ),
            pa_csv.ParseOptions(delimiter=sniffed.delimiter, ignore_empty_lines=False, invalid_row_handler=wrong_width),
            pa_csv.ConvertOptions(column_types=types, strings_can_be_null=True, check_utf8=False),
        )
        line = sniffed.header_lines + 1
        for piece in reader:
            lines, line = _line_numbers(line, len(piece), skipped)
            table = pa.table(piece)
            blank = _blank(table)
            if blank.any():
                table, lines = table.filter(pa.array(~blank)), lines[~blank]
            # Arrow reads ahead in a thread, which adds to both lists meanwhile: only what was looked at may be taken out.
            told = lost[:]
            del lost[: len(told)]
            yield _Lines(table, lines, told)
        if lost:
            yield _Lines(pa.table({name: pa.array([], types[name]) for name in names}), np.empty(0, np.int64), lost)


class _Ascii:
    """A stream with a question mark for every byte that is not ASCII: no part of a number, and Arrow cannot show it."""

    closed = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        return data if data.isascii() else data.translate(_QUESTION_MARKS)


def _line_numbers(first: int, count: int, skipped: list[int]) -> tuple[np.ndarray, int]:
    """The numbers of `count` lines from `first` on, without those `skipped` (ascending, and emptied of those passed)."""
    last, passed = first + count, 0
    while passed < len(skipped) and skipped[passed] < last:
        last, passed = last + 1, passed + 1
    lines = np.setdiff1d(np.arange(first, last), skipped[:passed], assume_unique=True)
    del skipped[:passed]
    return lines, last


def _blank(table: pa.Table) -> np.ndarray:
    """Rows without any value: empty lines, which count as lines and are no rows."""
    if table.column(0).null_count == 0:
        return np.zeros(len(table), bool)
    blank: np.ndarray = np.all([pc.is_null(column).to_numpy() for column in table.columns], axis=0)
    return blank


def _column_types(sniffed: _Sniffed, found: Layout, want: Want) -> dict[str, pa.DataType]:
    kind = np.dtype(want.columns.dtype).kind
    pixel = pa.int32() if kind in "ui" else pa.float64()
    return {**{str(place): pixel for place in found.pixels}, **{str(place): pa.float64() for place in found.labels}}


def _as_numbers(file: File, sniffed: _Sniffed, found: Layout, piece: _Lines) -> Batch:
    bad: dict[int, str] = {}
    for place, column in enumerate(piece.table.columns):
        if column.null_count:
            for row in np.flatnonzero(pc.is_null(column).to_numpy()):
                bad.setdefault(int(row), f"there is no value in {sniffed.names[place]}")
    filled = [pc.fill_null(column, 0) if column.null_count else column for column in piece.table.columns]
    return _batch(file, found, piece, [column.to_numpy() for column in filled], bad)


def _batch(file: File, found: Layout, piece: _Lines, values: Sequence[np.ndarray], bad: dict[int, str]) -> Batch:
    labels = [values[place] for place in found.labels]
    columns = {
        "image": np.stack([values[place] for place in found.pixels], axis=1),
        "label": labels[0] if len(labels) == 1 else np.stack(labels, axis=1),
    }
    return Batch(columns, Place(file.name, piece.lines, "line"), bad, piece.lost)


def _read_text(file: File, sniffed: _Sniffed, found: Layout, want: Want, done: int) -> Iterator[Batch]:
    """The rows after the first `done` ones, read as text, and all lines of another width."""
    types = {str(place): pa.binary() for place in range(sniffed.width)}
    for piece in _tables(file, sniffed, want, types):
        passed = min(done, len(piece.table))
        done -= passed
        rest = _Lines(piece.table.slice(passed), piece.lines[passed:], piece.lost)
        bad: dict[int, str] = {}
        values = [_numbers(column, sniffed.names[place], bad) for place, column in enumerate(rest.table.columns)]
        yield _batch(file, found, rest, values, bad)


def _numbers(column: pa.ChunkedArray, name: str, bad: dict[int, str]) -> np.ndarray:
    """A column of text as float64; where a text is no number, says so in `bad`."""
    try:
        if column.null_count == 0:
            return pc.cast(pc.cast(column, pa.string()), pa.float64()).to_numpy()  # type: ignore[no-any-return]
    except pa.ArrowInvalid:
        pass
    values = np.zeros(len(column))
    for row, text in enumerate(column.to_pylist()):
        try:
            values[row] = float(text)
        except (TypeError, ValueError):
            shown = "there is no value" if text is None else f"found {text[:40].decode(errors='replace')!r}, which is no number,"
            bad.setdefault(row, f"{shown} in {name}")
    return values


def _read_own(file: File, sniffed: _Sniffed) -> Iterator[Batch]:
    """All columns under their own names, for a task that prepares them."""
    with damage(file), file.unpacked() as stream:
        table = pa_csv.read_csv(stream, parse_options=pa_csv.ParseOptions(delimiter=sniffed.delimiter))
    columns = {name: table[name].to_numpy() for name in table.column_names}
    yield Batch(columns, Place(file.name, range(2, 2 + len(table)), "line"))


def _sniff(file: File, want: Want) -> _Sniffed:
    """Tells delimiter, header and number of columns by the first line."""
    if nonsense := file.nonsense():
        raise DataError(nonsense)
    with damage(file), file.unpacked() as stream:
        head = stream.read(_SNIFF_BYTES + 32 * want.row_size)
    at, line = next(
        ((at, line) for at, line in enumerate(head.removeprefix(codecs.BOM_UTF8).splitlines()) if line.strip()), (0, b"")
    )
    try:
        text = line.decode()
    except UnicodeDecodeError:
        text = "\0"
    if not text or "\0" in text:
        raise DataError(f"{file.name} is not CSV: found the first bytes {head[:8].hex(' ') or '(none)'}; expected text in UTF-8")
    delimiter = max(",;\t", key=text.count)
    fields: list[str] = next(csv.reader([text], delimiter=delimiter), [])
    header = tuple(field.strip() for field in fields) if any(not _is_number(field) for field in fields) else None
    return _Sniffed(delimiter, header, at + 1 if header else 0, len(fields))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _renamed(file: File, header: tuple[str, ...], first: File, expected: tuple[str, ...]) -> str:
    if len(header) != len(expected):
        return f"{file.name} has {len(header)} columns; expected {len(expected)}, as in {first.name}"
    at, found, wanted = next((i, a, b) for i, (a, b) in enumerate(zip(header, expected, strict=True), 1) if a != b)
    return f"{file.name}: column {at} is named {found!r}; expected {wanted!r}, as in {first.name}"
