"""Downloads: whole and right, or not at all; once a machine, however many processes ask."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from raytrain_app.data.files import shown
from raytrain_app.data.known import KNOWN, KnownFile
from raytrain_app.errors import DataError

OnBytes = Callable[[str, int], None]
_TRIES = 3


@dataclass(frozen=True)
class Patience:
    """How long to wait for a mirror before the next one is tried.

    Attributes:
        connect_s: for a connection, and for each read to give anything.
        window_s: in every period of this length `window_bytes` must arrive.
        total_s: for a file.
    """

    connect_s: float = 10.0
    window_s: float = 20.0
    window_bytes: int = 64 * 1024
    total_s: float = 900.0


class _MirrorError(Exception):
    """Why a mirror gave no file; `again` if asking for the rest may help."""

    def __init__(self, text: str, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


def cache_folder() -> Path:
    """Where downloads are kept, by the platform's convention."""
    return user_cache_path("raytrain", appauthor=False) / "data"


def fetch_set(
    name: str,
    folder: Path,
    mirrors: Sequence[str] | None = None,
    patience: Patience = Patience(),
    on_bytes: OnBytes | None = None,
) -> None:
    """Downloads what is missing of a well-known data set.

    Args:
        name: "mnist" or "fashion-mnist".
        folder: where the files go; several processes may ask for the same folder at once, and one of them downloads.
        mirrors: folders (URLs that end with a slash) to try in order; by default the published ones.
        patience: when to give a mirror up.
        on_bytes: called with a file's name and the number of its bytes that are there, as they arrive.

    Raises:
        DataError: no mirror gave a file; the text lists each of them and why. Nothing half done is left behind.
    """
    with _locked(folder):
        for file in KNOWN[name].files:
            if not (is_complete(folder, file) and _sha256(folder / file.name) == file.sha256):
                urls = [mirror + file.name for mirror in mirrors or KNOWN[name].mirrors]
                _fetch_file(urls, folder / file.name, file, patience, on_bytes, KNOWN[name].title)


def is_complete(folder: Path, file: KnownFile) -> bool:
    """Whether the published file is in `folder`, by its size: files get their name only after their checksum was right."""
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.size


def fetch_url(url: str, offline: bool, patience: Patience = Patience(), folder: Path | None = None) -> Path:
    """Downloads a user's own file, unless the copy in the cache is still what the server has (by its ETag).

    Raises:
        DataError: the file cannot be had, or `offline` and it is not in the cache.
    """
    place = (folder or cache_folder()) / "urls" / hashlib.sha256(url.encode()).hexdigest()[:16]
    target = place / (os.path.basename(url.split("?")[0]) or "data")
    if offline:
        if target.is_file():
            return target
        raise DataError(
            f"{shown(url)} is not in the cache ({place}), and data.offline: true forbids to download it; set it to false once"
        )
    with _locked(place):
        tag = place / f".{target.name}.etag"
        known_tag = tag.read_text() if target.is_file() and tag.is_file() else ""
        part = _part(target)
        try:
            found_tag = _download(url, part, None, patience, None, known_tag)
            if found_tag is not None:
                os.replace(part, target)
                tag.write_text(found_tag)
        except _MirrorError as error:
            raise DataError(
                f"{shown(url)} cannot be downloaded: {error}; check the address and the network"
                + ("; data.offline: true uses the copy in the cache" if target.is_file() else "")
            ) from None
        finally:
            part.unlink(missing_ok=True)
    return target


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire()
    except OSError as error:
        raise DataError(f"the download folder {folder} cannot be written: {error.strerror or error}; make it writable") from None
    with lock:
        yield


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _fetch_file(
    urls: Sequence[str], target: Path, file: KnownFile, patience: Patience, on_bytes: OnBytes | None, title: str
) -> None:
    part, failures = _part(target), []
    try:
        for url in urls:
            try:
                _fetch_from(url, part, file, patience, on_bytes)
            except _MirrorError as error:
                failures.append(f"  {url}: {error}")
            else:
                os.replace(part, target)
                return
    finally:
        part.unlink(missing_ok=True)
    tried = "\n".join(failures)
    raise DataError(
        f"{title}'s file {file.name} cannot be downloaded; tried\n{tried}\nPut the files of {title} into {target.parent} "
        "yourself, set data.source to a folder that has them, or use data.source: mnist-sample, which needs no download"
    )


def _fetch_from(url: str, part: Path, file: KnownFile, patience: Patience, on_bytes: OnBytes | None) -> None:
    """Downloads from one mirror; a cut connection is taken up where it ended, and a wrong file is begun again once."""
    for attempt in range(_TRIES):
        resumed = part.exists() and part.stat().st_size > 0
        try:
            _download(url, part, file, patience, on_bytes)
            _verify(part, file)
        except _MirrorError as error:
            if attempt == _TRIES - 1 or not (error.again or resumed):
                raise
            if not error.again:
                part.unlink(missing_ok=True)
        else:
            return


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _verify(part: Path, file: KnownFile) -> None:
    found = _sha256(part)
    if found == file.sha256:
        return
    data = part.read_bytes()
    part.unlink()
    if data.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        raise _MirrorError(f"it answered with a web page of {len(data):,} bytes; expected {file.size:,} bytes")
    raise _MirrorError(f"found {len(data):,} bytes with sha256 {found}; expected {file.size:,} bytes with sha256 {file.sha256}")


def _download(
    url: str, part: Path, file: KnownFile | None, patience: Patience, on_bytes: OnBytes | None, known_tag: str = ""
) -> str | None:
    """Downloads to `part`, from where it ends on; the answer's ETag, or None if `known_tag` is still right."""
    start = part.stat().st_size if file and part.exists() else 0
    headers = {"User-Agent": "raytrain"}
    if start:
        headers["Range"] = f"bytes={start}-"
    if known_tag:
        headers["If-None-Match"] = known_tag
    received = 0
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=patience.connect_s) as answer:
            if not (answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")):
                start = 0
            length = answer.headers.get("Content-Length")
            with part.open("ab" if start else "wb") as out:
                for chunk in _chunks(answer, patience):
                    out.write(chunk)
                    received += len(chunk)
                    if on_bytes:
                        on_bytes(file.name if file else url, start + received)
                    if file and start + received > file.size:
                        raise _MirrorError(f"it sent more than the {file.size:,} bytes that the file has")
                out.flush()
                os.fsync(out.fileno())
            if length is not None and received < int(length):
                raise _MirrorError(f"the connection ended after {received:,} of {int(length):,} bytes", again=True)
            return answer.headers.get("ETag") or ""
    except urllib.error.HTTPError as error:
        if error.code == 304 and known_tag:
            return None
        if error.code == 416:
            part.unlink(missing_ok=True)
        raise _MirrorError(f"it answered {error.code} {error.reason}", again=error.code == 416) from None
    except TimeoutError:
        raise _MirrorError(f"nothing came within {patience.connect_s:g} s") from None
    except urllib.error.URLError as error:
        late = isinstance(error.reason, TimeoutError)
        raise _MirrorError(
            f"no connection within {patience.connect_s:g} s" if late else f"no connection ({error.reason})"
        ) from None
    except (http.client.HTTPException, ConnectionError) as error:
        raise _MirrorError(f"the connection broke ({type(error).__name__})", again=received > 0) from None
    except ValueError as error:
        raise _MirrorError(f"the address is not right ({error})") from None


def _chunks(answer: http.client.HTTPResponse, patience: Patience) -> Iterator[bytes]:
    began = window_began = time.monotonic()
    in_window = 0
    while chunk := answer.read1(1 << 16):
        yield chunk
        now, in_window = time.monotonic(), in_window + len(chunk)
        if now - began > patience.total_s:
            raise _MirrorError(f"it took longer than {patience.total_s:g} s")
        if now - window_began > patience.window_s:
            if in_window < patience.window_bytes:
                raise _MirrorError(f"it is too slow: {in_window:,} bytes in {patience.window_s:g} s")
            window_began, in_window = now, 0
