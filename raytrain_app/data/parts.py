"""The words that formats, reading and checking share: a file, the part of a file that one task reads, a batch of raw rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raytrain_app.data.files import File
from raytrain_app.task import Columns

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Want:
    """What every row must look like, and how raw rows are turned into that.

    Attributes:
        columns: the task's columns; `num_classes` is the job's where it names one.
        transpose: swap rows and columns of every image.
        label_offset: taken away from every raw label.
        one_hot: the label is the position of the 1 in `num_classes` columns.
        raw: the task prepares the source's own columns itself, so a format must not guess what they mean.
        allow_modified: accept a well-known file with another checksum than the published one.
    """

    columns: Columns
    transpose: bool = False
    label_offset: int = 0
    one_hot: bool = False
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


@dataclass(frozen=True)
class Part:
    """Rows that one task reads, from one file (or a file of images and its file of labels), all of one split.

    Attributes:
        split: "train", "validation" or "test".
        format: the name of the format that reads it.
        files: what to open.
        start: first row to read, counted in the file.
        stop: row to stop before; None reads to the end.
        where: what else the format must know to read it, in the format's own words.
    """

    split: str
    format: str
    files: tuple[File, ...]
    start: int = 0
    stop: int | None = None
    where: tuple[str, ...] = ()


@dataclass
class Batch:
    """Raw rows as the source has them.

    Attributes:
        columns: by name, arrays of equal length; the names that the format gives are "image" and "label" where the
            source has no names of its own.
        places: names each row for the user, such as "data.csv, line 7": `places[i]` or, in a row of rows, the first one
            counted on by `places(i)`.
        bad: rows that could not be read at all, and why; their values are arbitrary.
    """

    columns: Mapping[str, np.ndarray]
    place: Place
    bad: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return min((len(values) for values in self.columns.values()), default=0)


@dataclass(frozen=True)
class Place:
    """Names rows for the user: `file`, and the number of the first row in `unit`s; or one file a row."""

    file: str
    first: int = 0
    unit: str = "row"
    files: tuple[str, ...] = ()

    def of(self, row: int) -> str:
        """Where row `row` of the batch comes from."""
        return self.files[row] if self.files else f"{self.file}, {self.unit} {self.first + row}"
