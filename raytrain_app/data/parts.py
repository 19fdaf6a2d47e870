"""The words that formats, reading and checking share: what is wanted, a part of a source, a batch of raw rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from raytrain_app.data.files import File
from raytrain_app.task import Columns

SPLITS = ("train", "validation", "test")

_SPLIT_WORDS = {
    "train": "train", "training": "train",
    "test": "test", "testing": "test", "t10k": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
}  # fmt: skip


def split_of(name: str) -> str | None:
    """The split that a file's path, a key or a value names by one of its words, None if it names none."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), None)


def times(shape: tuple[int, ...]) -> str:
    """A shape for people: (28, 28) is "28 x 28"."""
    return " x ".join(map(str, shape)) or "one number"


@dataclass(frozen=True)
class Want:
    """What every row must look like, and how raw rows are turned into that.

    Attributes:
        columns: the task's columns; `num_classes` is the job's where it names one.
        block_rows: rows of a full block.
        part_rows: rows that one task should read at most, where a file can be read in parts.
        transpose: swap the first two axes of every `x`.
        label_offset: taken away from every label as stored.
        one_hot: the label is the place of the 1 among `num_classes` columns.
        title: the data set that the source's name promises; None if the source is just files.
        raw: the task prepares the source's own columns itself, so a format must not guess what they mean.
        allow_modified: accept a well-known file whose checksum is not the published one.
    """

    columns: Columns
    block_rows: int = 1 << 16
    part_rows: int = 1 << 16
    transpose: bool = False
    label_offset: int = 0
    one_hot: bool = False
    title: str | None = None
    raw: bool = False
    allow_modified: bool = False

    @property
    def row_size(self) -> int:
        """Values of one `x`."""
        return int(np.prod(self.columns.shape, dtype=np.int64))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a block: `x` and an int64 label."""
        return self.row_size * np.dtype(self.columns.dtype).itemsize + 8

    @property
    def labels(self) -> tuple[int, int]:
        """The smallest and the largest label as stored."""
        return self.label_offset, self.label_offset + self.columns.num_classes - 1


@dataclass(frozen=True)
class Part:
    """Rows that one task reads, all of one split.

    Attributes:
        split: "train", "validation" or "test".
        format: the name of the format that reads it.
        files: what to open; a file of images and its file of labels, or one file, or one file a row.
        start: first row to read, counted in the file.
        stop: row to stop before; None reads to the end.
        where: what else the format needs to find the rows, in its own words.
    """

    split: str
    format: str
    files: tuple[File, ...]
    start: int = 0
    stop: int | None = None
    where: tuple[str, ...] = ()


@dataclass
class Plan:
    """What is to be read, and what headers tell about it.

    Attributes:
        parts: in the order of their rows.
        problems: what is wrong, one sentence each; there is nothing to read if there are any.
        notes: what the user should know.
    """

    parts: list[Part] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """Names the rows of a batch for the user.

    Attributes:
        file: path or URI.
        numbers: of each row; lines are counted from 1, as editors do, all else from 0, as numpy does.
        unit: "row" or "line".
        files: one name a row, for sources with a file a row.
    """

    file: str
    numbers: Sequence[int] | np.ndarray = ()
    unit: str = "row"
    files: Sequence[str] = ()

    def of(self, row: int) -> str:
        """Where row `row` of the batch comes from."""
        return self.files[row] if self.files else f"{self.file}, {self.unit} {self.numbers[row]}"


@dataclass
class Batch:
    """Raw rows as the source has them.

    Attributes:
        columns: by name, arrays of equal length.
        place: where the rows come from.
        bad: rows that could not be read, and why; their values are arbitrary.
        lost: rows that could not be read and are not in `columns`, one sentence each.
    """

    columns: Mapping[str, np.ndarray]
    place: Place
    bad: dict[int, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
