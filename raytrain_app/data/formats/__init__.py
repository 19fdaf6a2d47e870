"""The file formats that can be read; a new one is one file with `recognises`, `plan` and `read`, named here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from raytrain_app.data.files import File
from raytrain_app.data.formats import csv, idx, images, npz, parquet
from raytrain_app.data.parts import Batch, Part, Plan, Want


class Format(Protocol):
    """What the module of a format has."""

    def recognises(self, file: File, head: bytes) -> bool:
        """Whether `file` is, or is meant to be, of this format: told by its first bytes `head` or by its name."""

    def plan(self, files: Sequence[File], want: Want) -> Plan:
        """What to read, after checking all that headers tell; reads little."""

    def read(self, part: Part, want: Want) -> Iterator[Batch]:
        """The part's rows in order, in batches of at most about `want.block_rows`.

        Raises:
            DataError: the file is damaged; the batches so far are good.
        """


# In the order in which they are asked: what can be told by content comes before what is told by name or guessed.
FORMATS: Mapping[str, Format] = {"images": images, "parquet": parquet, "npz": npz, "idx": idx, "csv": csv}
