"""Files that grow: appended to on this machine, and carried to object stores, which cannot append, every few seconds."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from raytrain_app.errors import StorageError
from raytrain_app.storage.folder import Folder

EVERY_S = 5.0
"""How often changed files are uploaded."""
SHARE = 0.1
"""Largest share of the time that uploads may take, since a file is uploaded whole each time and may become large."""


class Spool:
    """Gives local paths for files of a folder. On a disk they are the files themselves.

    Args:
        folder: where the files belong.
        every_s: seconds between uploads.
    """

    def __init__(self, folder: Folder, every_s: float = EVERY_S) -> None:
        self._folder, self._every_s = folder, every_s
        self._sizes: dict[str, int] = {}
        self._here = folder.local_path
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._upload_until_closed, daemon=True, name="spool")
        if self._here is None:
            self._here = Path(tempfile.mkdtemp(prefix="raytrain-"))
            self._thread.start()

    def path(self, name: str) -> Path:
        """Where to append to the file, with what the folder holds of it already."""
        assert self._here is not None
        path = self._here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._folder.local_path is None and name not in self._sizes:
            path.write_bytes(self._folder.read(name) if self._folder.exists(name) else b"")
            self._sizes[name] = path.stat().st_size
        return path

    def close(self) -> None:
        """Uploads what is new and ends.

        Raises:
            StorageError: it cannot be uploaded; the message says where the files are instead.
        """
        if self._folder.local_path is not None or self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        try:
            self._upload()
        except StorageError as error:
            raise StorageError(f"{error}. The run's files are kept in {self._here}") from error
        assert self._here is not None
        shutil.rmtree(self._here, ignore_errors=True)  # a temporary folder that the system cleans up as well

    def _upload_until_closed(self) -> None:
        pause_s = self._every_s
        while not self._closing.wait(pause_s):
            started_s = time.monotonic()
            with suppress(StorageError):  # nothing is lost: the files are here, and the next round or `close` tries again
                self._upload()
            pause_s = max(self._every_s, (time.monotonic() - started_s) / SHARE)

    def _upload(self) -> None:
        assert self._here is not None
        for name, uploaded_bytes in list(self._sizes.items()):
            data = (self._here / name).read_bytes()
            if len(data) != uploaded_bytes:
                self._folder.write(name, data)
                self._sizes[name] = len(data)
