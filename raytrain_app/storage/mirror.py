"""A folder for libraries that write files by themselves: on this machine, and carried to object stores."""

from __future__ import annotations

import tempfile
from pathlib import Path

from raytrain_app.storage.folder import Folder


class Mirror:
    """A local folder whose files end up in `folder`. Where that is on a disk, both are the same.

    Attributes:
        path: where to write.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.path = folder.local_path or Path(tempfile.mkdtemp(prefix="raytrain-"))
        self._pushed: dict[Path, tuple[int, int]] = {}

    def push(self) -> None:
        """Carries files that are new or have changed since the last call.

        Raises:
            StorageError: a file cannot be written there.
        """
        if self._folder.local_path is not None:
            return
        for path in sorted(path for path in self.path.rglob("*") if path.is_file()):
            stamp = path.stat().st_mtime_ns, path.stat().st_size
            if self._pushed.get(path) != stamp:
                self._folder.write(path.relative_to(self.path).as_posix(), path.read_bytes())
                self._pushed[path] = stamp
