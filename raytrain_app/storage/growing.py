"""Reading a file of records while somebody appends to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raytrain_app.storage import records
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.records import Record


class GrowingFile:
    """A file of records that grows; `read` gives what was added since the last time."""

    def __init__(self, folder: Folder, name: str, offset: int = 0, tail_bytes: int | None = None) -> None:
        self._folder, self._name, self._offset, self._tail_bytes = folder, name, offset, tail_bytes
        self._where = folder.at(name)

    def read(self) -> list[Record]:
        size, read_from = self._open()
        if self._tail_bytes is not None:
            start, self._tail_bytes = size - self._tail_bytes, None
            self._offset = start + read_from(start).find(b"\n") + 1 if start > 0 else 0
        elif size < self._offset:  # a resumed run has cut off what was written after its checkpoint
            self._offset = 0
        data = read_from(self._offset)
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return records.parse(data, self._where)

    def _open(self) -> tuple[int, Callable[[int], bytes]]:
        """The file's size, and what reads it from an offset to its end."""
        if not self._folder.exists(self._name):
            return 0, lambda offset: b""
        if self._folder.local_path is None:
            data = self._folder.read(self._name)
            return len(data), lambda offset: data[offset:]
        path = self._folder.local_path / self._name
        return path.stat().st_size, lambda offset: _read_from(path, offset)


def _read_from(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()
