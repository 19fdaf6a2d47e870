"""Folders on object stores (gs://, s3://), through pyarrow, with retries and a deadline that always holds."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pyarrow import fs

from raytrain_app.errors import StorageError
from raytrain_app.google import lacks_credentials
from raytrain_app.storage.folder import Folder, explained, is_denied, is_missing, shown

T = TypeVar("T")
DEADLINE_S = 120.0
"""Longest time for one operation with all its retries, an upload among them."""
CLIENT_RETRY = timedelta(seconds=5)
"""How long Google's client tries again by itself."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0


class RemoteFolder(Folder):
    """See `Folder`. Object stores show a new object only when it is complete.

    Args:
        uri: gs:// or s3://, with pyarrow's options.
        deadline_s: longest time for one operation with all its retries.
    """

    def __init__(self, uri: str, deadline_s: float = DEADLINE_S) -> None:
        path, question, options = uri.partition("?")
        self._path, self._options = path.rstrip("/"), question + options
        self.uri = self._path + self._options
        self._deadline_s = deadline_s

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFolder, (self.uri, self._deadline_s)

    @property
    def local_path(self) -> Path | None:
        return None

    def child(self, *parts: str) -> RemoteFolder:
        folder = RemoteFolder("/".join((self._path, *parts)) + self._options, self._deadline_s)
        if "_store" in self.__dict__:  # share the connection
            folder.__dict__["_store"] = self._store
        return folder

    def read(self, path: str) -> bytes:
        def download() -> bytes:
            with self._store.open_input_stream(self._key(path)) as stream:
                return bytes(stream.read())

        return self._persist("read", path, download)

    def write(self, path: str, data: bytes) -> None:
        def upload() -> None:
            with self._store.open_output_stream(self._key(path)) as stream:
                stream.write(data)

        self._persist("write", path, upload)

    def create(self, path: str, data: bytes) -> bool:
        # pyarrow has no conditional write, so of two that create at the same moment both may believe they did.
        if self.exists(path):
            return False
        self.write(path, data)
        return True

    def exists(self, path: str = "") -> bool:
        kind = self._persist("look at", path, lambda: self._store.get_file_info(self._key(path)).type)
        return bool(kind != fs.FileType.NotFound)

    def files(self) -> Mapping[str, int]:
        selector = fs.FileSelector(self._key(""), recursive=True, allow_not_found=True)
        start = len(self._key("")) + 1
        return {
            info.path[start:]: info.size
            for info in self._persist("list", "", lambda: self._store.get_file_info(selector))
            if info.type == fs.FileType.File and info.path[start:]
        }

    def list(self) -> list[str]:
        # Asked for one level only, pyarrow leaves out folders that are there by their files alone, as all are in gs://.
        return sorted({path.partition("/")[0] for path in self.files()})

    def delete(self, path: str) -> None:
        def remove() -> None:
            kind = self._store.get_file_info(self._key(path)).type
            if kind == fs.FileType.File:
                self._store.delete_file(self._key(path))
            elif kind == fs.FileType.Directory:
                # On gs:// it misses a file for the folder itself, after it has deleted all that is in it.
                with suppress(FileNotFoundError):
                    self._store.delete_dir(self._key(path))

        self._persist("delete", path, remove)

    def check_writable(self) -> None:
        probe = f".raytrain-{uuid.uuid4().hex}"
        self.write(probe, b"raytrain")
        self.delete(probe)

    @cached_property
    def _store(self) -> Any:
        if lack := lacks_credentials(self.uri):
            raise StorageError(f"cannot use {shown(self.uri)}: {lack}")
        store = fs.FileSystem.from_uri(self.uri)[0]
        # From a URI, pyarrow lets S3's client try ten times, and Google's for a quarter of an hour, before they say a word, which
        # can hold up the program's end. Less can be set only where a file system is made from options, as unpickling does.
        make, (options,) = store.__reduce__()
        if isinstance(store, fs.S3FileSystem):
            return make({**options, "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=2)})
        return make({**options, "retry_time_limit": CLIENT_RETRY})

    def _key(self, path: str) -> str:
        folder = self._path.partition("://")[2].rpartition("@")[2]
        return f"{folder}/{path}" if path else folder

    def _persist(self, doing: str, path: str, operation: Callable[[], T]) -> T:
        """Runs an operation again and again, ever more slowly, until it succeeds, cannot succeed, or the deadline is over."""
        give_up_s = time.monotonic() + self._deadline_s
        pause_s, last_error = FIRST_PAUSE_S, ""
        with explained(doing, self.at(path)):
            while True:
                try:
                    return _within(give_up_s - time.monotonic(), operation)
                except TimeoutError:
                    raise TimeoutError(f"no answer within {self._deadline_s:g} s{last_error}") from None
                except OSError as error:
                    if is_denied(error) or is_missing(error) or time.monotonic() + pause_s >= give_up_s:
                        raise
                    last_error = f" (before that: {error})"
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _within(seconds: float, operation: Callable[[], T]) -> T:
    """The operation's result; raises TimeoutError after `seconds`, and then leaves the operation to its fate.

    Clients of object stores have time-outs of their own, but none for all of an operation, and some wait for a quarter of
    an hour. A blocked call cannot be ended from outside, so it runs in a thread that nobody waits for.
    """
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def attempt() -> None:
        try:
            outcome.put((operation(), None))
        except BaseException as error:  # handed over to the caller's thread, which raises it
            outcome.put((None, error))

    threading.Thread(target=attempt, daemon=True, name="storage").start()
    try:
        result, error = outcome.get(timeout=max(seconds, 0.0))
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]
