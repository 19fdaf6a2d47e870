"""The file formats that can be read; a new one is one file with `recognises`, `plan` and `read`, named here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from raytrain_app.data.files import File
from raytrain_app.data.formats import idx, parquet
from raytrain_app.data.parts import Batch, Part, Want


class Format(Protocol):
    """What the module of a format has."""

    def recognises(self, file: File) -> bool:
        """Whether `file` is of this format, told by its first bytes where that is possible, else by its name."""

    def plan(self, files: Sequence[File], want: Want) -> list[Part]:
        """The parts to read, after checking all that headers tell.

        Raises:
            DataError: a file is damaged, or the files do not belong together.
        """

    def read(self, part: Part, want: Want, batch_rows: int) -> Iterator[Batch]:
        """The part's rows in order, in batches of `batch_rows` and a smaller last one.

        Raises:
            DataError: the file is damaged.
        """


FORMATS: Mapping[str, Format] = {"idx": idx, "parquet": parquet}
