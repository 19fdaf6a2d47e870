"""Folders on this machine's disks, network mounts included."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from raytrain_app.storage.folder import Folder, explained

UNFINISHED = ".unfinished-"
"""Start of the names that files have while they are written; a writer that was killed may leave some."""


class LocalFolder(Folder):
    """See `Folder`. A file is written beside its place, flushed to the disk and renamed."""

    def __init__(self, path: str) -> None:
        self.uri = path

    @property
    def local_path(self) -> Path:
        return Path(self.uri)

    def child(self, *parts: str) -> LocalFolder:
        return LocalFolder(str(Path(self.uri, *parts)))

    def read(self, path: str) -> bytes:
        with explained("read", self.at(path)):
            return Path(self.uri, path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        target = Path(self.uri, path)
        unfinished = target.with_name(f"{UNFINISHED}{uuid.uuid4().hex}")
        with explained("write", self.at(path)):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write_to_disk(unfinished, data)
                unfinished.replace(target)
            finally:
                unfinished.unlink(missing_ok=True)
            _flush_folder(target.parent)

    def create(self, path: str, data: bytes) -> bool:
        target = Path(self.uri, path)
        with explained("write", self.at(path)):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write_to_disk(target, data)
            except FileExistsError:
                return False
            _flush_folder(target.parent)
            return True

    def exists(self, path: str = "") -> bool:
        with explained("look at", self.at(path)):
            return os.path.lexists(Path(self.uri, path))

    def files(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        with explained("list", self.at("")):
            for folder, _, names in os.walk(self.uri):
                for name in names:
                    path = Path(folder, name)
                    with suppress(FileNotFoundError):  # deleted since it was listed
                        if not name.startswith(UNFINISHED):
                            found[path.relative_to(self.uri).as_posix()] = path.lstat().st_size
        return found

    def list(self) -> list[str]:
        with explained("list", self.at("")), suppress(FileNotFoundError):
            return sorted(name for name in os.listdir(self.uri) if not name.startswith(UNFINISHED))
        return []

    def delete(self, path: str) -> None:
        target = Path(self.uri, path)
        with explained("delete", self.at(path)):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target, ignore_errors=False)
            else:
                target.unlink(missing_ok=True)

    def check_writable(self) -> None:
        with explained("write to", self.at("")):
            nearest = next(path for path in (Path(self.uri), *Path(self.uri).parents) if path.exists())
            with tempfile.TemporaryFile(dir=nearest, prefix=UNFINISHED) as probe:
                probe.write(b"raytrain")
                probe.flush()


def _write_to_disk(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    """Makes a new name last; without this a machine that loses power may forget a file it has written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
