"""Finding and opening the files of a source."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import BinaryIO


@dataclass(frozen=True)
class File:
    """One file of a source.

    Attributes:
        name: path or URI, as the user would write it.
        inside: the path below the source's root, which tells splits and classes.
        size: in bytes.
    """

    name: str
    inside: str
    size: int

    def open(self) -> BinaryIO:
        """The file, to be read in binary."""
        return open(self.name, "rb")

    def head(self, size: int) -> bytes:
        """The first `size` bytes, or all if there are fewer."""
        with self.open() as stream:
            return stream.read(size)


def find_files(source: str) -> list[File]:
    """The files that `source` means, sorted by name."""
    source = os.path.expanduser(source)
    if os.path.isfile(source):
        return [File(source, os.path.basename(source), os.path.getsize(source))]
    found = []
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            found.append(File(path, os.path.relpath(path, source), os.path.getsize(path)))
    return found
