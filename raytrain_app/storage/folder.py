"""A folder on a disk or an object store, with the few operations a run needs. Files are written whole or not at all."""

from __future__ import annotations

import errno
import getpass
import os
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raytrain_app.errors import StorageError
from raytrain_app.google import account

DENIED = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "SIGNATURE_DOES_NOT_MATCH",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "credentials",
)
MISSING = ("NO_SUCH_BUCKET", "NoSuchBucket", "NOT_FOUND", "Not found")


class Folder(ABC):
    """A folder. It can be pickled and costs nothing to make; whether it exists is not asked until it is used.

    All methods raise `StorageError` on failure, which says who failed to do what where, and what to do. Paths are
    relative to the folder, with `/` between their parts.

    Attributes:
        uri: the folder's absolute path, or its gs:// or s3:// URI.
    """

    uri: str

    @staticmethod
    def open(uri: str) -> Folder:
        """The folder at a local path, a file://, gs:// or s3:// URI.

        URIs take the options of pyarrow's filesystems, such as `?endpoint_override=host:port&scheme=http`. A relative
        path means the one below the current folder now, also after the folder was sent to another process.

        Raises:
            StorageError: the URI cannot be understood.
        """
        from raytrain_app.storage.local import LocalFolder
        from raytrain_app.storage.remote import RemoteFolder

        if uri.startswith(("gs://", "s3://")):
            return RemoteFolder(uri)
        if "://" in uri and not uri.startswith("file://"):
            raise StorageError(f"storage {shown(uri)}: expected a folder, gs://bucket/path or s3://bucket/path")
        return LocalFolder(str(Path(uri.removeprefix("file://")).expanduser().absolute()))

    @abstractmethod
    def child(self, *parts: str) -> Folder:
        """The folder inside this one."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The content of a file."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Writes a file with the folders above it; readers see the old content or the new one, never a part."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Writes a file that must not be there yet; False, and nothing done, if it is."""

    @abstractmethod
    def exists(self, path: str = "") -> bool:
        """Whether there is a file or a folder."""

    @abstractmethod
    def files(self) -> Mapping[str, int]:
        """All files in the folder and below, with their sizes in bytes; empty if the folder is not there."""

    @abstractmethod
    def list(self) -> list[str]:
        """Names of the files and folders directly in the folder, in order; empty if it is not there."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Deletes a file, or a folder with all that is in it; nothing happens if it is not there."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raises if files cannot be written here; leaves nothing behind."""

    @property
    @abstractmethod
    def local_path(self) -> Path | None:
        """The folder on this machine's disks, None on an object store."""

    def read_text(self, path: str) -> str:
        """The content of a UTF-8 file."""
        try:
            return self.read(path).decode()
        except UnicodeDecodeError as error:
            raise StorageError(f"{self.at(path)} is damaged: byte {error.start} is not UTF-8 text") from None

    def at(self, path: str) -> str:
        """What to call a file in messages."""
        return shown(self.child(path).uri if path else self.uri)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self.uri)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and self.uri == other.uri

    def __hash__(self) -> int:
        return hash(self.uri)


def shown(uri: str) -> str:
    """A URI as it may be printed: without the key and secret that it may hold."""
    return re.sub(r"//[^/@]*@", "//***@", uri)


@contextmanager
def explained(doing: str, where: str) -> Iterator[None]:
    """Turns errors of the operating system and of object stores into a `StorageError`."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors are OSError and ValueError
        reason = " ".join((error.strerror if isinstance(error, OSError) and error.strerror else str(error)).split())
        raise StorageError(f"cannot {doing} {where} from {_who(where)}: {shown(reason[:400])}; {_advice(error)}") from error


def is_denied(error: Exception) -> bool:
    """Whether the caller lacks the right to do this."""
    return isinstance(error, PermissionError) or any(word in str(error) for word in DENIED)


def is_missing(error: Exception) -> bool:
    """Whether a bucket or a file is not there."""
    return isinstance(error, FileNotFoundError) or any(word in str(error) for word in MISSING)


def _who(where: str) -> str:
    if where.startswith("gs://") and (name := account()) is not None:
        return f"host {socket.gethostname()} as {name}"
    try:
        user: Any = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user that has no name
        user = os.getuid()
    return f"host {socket.gethostname()} as user {user}"


def _advice(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if isinstance(error, TimeoutError):
        return "check the network between this machine and the storage"
    if is_denied(error):
        return "give this user, or the machine's service account, the right to read and write there"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there, or set another `storage`"
    if is_missing(error):
        return "check the name of the bucket and the path"
    return "check that `storage` names a folder or bucket that is there and can be written"
