"""Finding and opening the files of a source, local or in a bucket."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import gzip
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pyarrow as pa
from pyarrow import fs

from raytrain_app.errors import DataError
from raytrain_app.google import lacks_credentials

GZIP = b"\x1f\x8b"
# Scheme, credentials, bucket and path (which may be a glob), options.
_REMOTE = re.compile(r"(?P<scheme>(?:gs|gcs|s3)://)(?P<user>[^/@]*@)?(?P<path>.*?)(?P<options>\?\w+=.*)?$")
_HTML = re.compile(rb"\s*<(!doctype|html|head|\?xml)", re.IGNORECASE)


@dataclass(frozen=True)
class File:
    """One file of a source.

    Attributes:
        name: path or URI for people, without the URI's options and credentials.
        inside: the path below the source's root, which may name split and class.
        size: in bytes.
        uri: what to open, where that is a URI; empty for a local path.
    """

    name: str
    inside: str
    size: int
    uri: str = ""

    def open(self) -> BinaryIO:
        """The file, for binary reading; seekable."""
        if not self.uri:
            return open(self.name, "rb")
        filesystem, path = fs.FileSystem.from_uri(self.uri)
        return cast(BinaryIO, filesystem.open_input_file(path))

    @contextlib.contextmanager
    def unpacked(self) -> Iterator[BinaryIO]:
        """The file for binary reading, through gunzip if it is gzipped; see `damage` for what reading may raise."""
        with self.open() as stream:
            gzipped = stream.read(2) == GZIP
            stream.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if gzipped else stream

    def head(self, size: int, unpack: bool = False) -> bytes:
        """The first bytes, at most `size`; fewer if the file is shorter, or cannot be unpacked further."""
        try:
            with damage(self), self.unpacked() if unpack else self.open() as stream:
                return bytes(stream.read(size))
        except DataError:
            return b""

    def nonsense(self) -> str | None:
        """Says that the file is no data of any kind: empty, or a web page saved by a failed download; else None."""
        if self.size == 0:
            return f"{self.name} is empty (0 bytes); get it again"
        head = self.head(64)
        if _HTML.match(head):
            return (
                f"{self.name} is a web page and not data: it has {self.size:,} bytes and starts with {head[:24]!r}, as when a "
                "download was answered with an error page; get it again"
            )
        return None


@contextlib.contextmanager
def damage(file: File) -> Iterator[None]:
    """Turns what libraries raise for a damaged file into a DataError that names it."""
    try:
        yield
    except EOFError:
        raise DataError(f"{file.name} is cut off: its {file.size:,} bytes end before the gzip data does; get it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file.name} is damaged: its gzip data cannot be unpacked ({error}); get it again") from None
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file.name} cannot be read: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text, short enough for one sentence."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= 300 else line[:297] + "..."


def shown(source: str) -> str:
    """A path or URI for people: without credentials and options."""
    return re.sub(r"\?\w+=[^,]*", "", re.sub(r"://[^/@,]*@", "://", source))


def find_files(source: str) -> list[File]:
    """The files that a path, a glob, a URI or several of them separated by commas mean, in the order of their names.

    Raises:
        DataError: there are none, or a bucket cannot be listed.
    """
    names = [source] if os.path.exists(os.path.expanduser(source)) else [name.strip() for name in source.split(",")]
    return [file for name in names if name for file in (_remote(name) if _REMOTE.match(name) else _local(name))]


def _local(name: str) -> list[File]:
    path = os.path.expanduser(re.sub(r"^file://", "", name))
    if os.path.isfile(path):
        return [File(path, os.path.basename(path), os.path.getsize(path))]
    if os.path.isdir(path):
        root, found = path, [os.path.join(folder, file) for folder, _, files in os.walk(path) for file in files]
    else:
        root = os.path.dirname(re.split(r"[*?\[]", path)[0])
        found = [file for file in glob.glob(path, recursive=True) if os.path.isfile(file)]
    files = [File(file, os.path.relpath(file, root or "."), os.path.getsize(file)) for file in sorted(found)]
    return _visible(files, name, f"looked in {os.path.abspath(root or '.')}")


def _remote(uri: str) -> list[File]:
    match = cast("re.Match[str]", _REMOTE.match(uri))
    scheme, user, path, options = (match[group] or "" for group in ("scheme", "user", "path", "options"))
    pattern = bool(re.search(r"[*?\[]", path))
    root = re.split(r"[*?\[]", path)[0].rpartition("/")[0] if pattern else path.rstrip("/")
    if lack := lacks_credentials(uri):
        raise DataError(f"{scheme}{path} cannot be listed: {lack}")
    try:
        filesystem, root = fs.FileSystem.from_uri(f"{scheme}{user}{root}{options}")
        info = filesystem.get_file_info(root)
        if info.type == fs.FileType.File:
            return [File(scheme + root, os.path.basename(root), info.size, uri)]
        listed = filesystem.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{scheme}{path} cannot be listed: {first_line(error)}; check the URI, the credentials and this machine's network"
        ) from None
    files = [
        File(scheme + entry.path, entry.path[len(root) :].lstrip("/"), entry.size, f"{scheme}{user}{entry.path}{options}")
        for entry in sorted(listed, key=lambda entry: cast(str, entry.path))
        if entry.type == fs.FileType.File and (not pattern or fnmatch.fnmatch(entry.path, path))
    ]
    return _visible(files, scheme + path, f"listed {scheme}{root}")


def _visible(files: list[File], name: str, looked: str) -> list[File]:
    visible = [file for file in files if not any(part.startswith(".") for part in file.inside.split(os.sep))]
    if not visible:
        raise DataError(f"data.source: there is nothing at {name} ({looked}); expected a file, a folder, a glob or a URI")
    return visible


def read_all(stream: Any, size: int) -> bytes:
    """Exactly `size` bytes, or fewer at the end of the stream; a read may return less than was asked for."""
    data: bytes = stream.read(size)
    while len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data
