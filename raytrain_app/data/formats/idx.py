"""IDX: the format of MNIST's own files, raw or gzipped. Big-endian; a magic number, the sizes, then the values."""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from raytrain_app.data import known
from raytrain_app.data.files import GZIP, File, damage, read_all
from raytrain_app.data.parts import Batch, Part, Place, Plan, Want, split_of, times
from raytrain_app.errors import DataError

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
# One byte of deflated data holds at most 1032 bytes (zlib's technical details).
_MOST_DEFLATED = 1032
_NAMED = re.compile(r"idx\d|ubyte", re.IGNORECASE)
_ROLE_WORDS = re.compile(r"images?|labels?|idx\d*([-._]?(u?byte|short|int|float|double))?|ubyte|gz", re.IGNORECASE)


@dataclass(frozen=True)
class _Header:
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return 4 + 4 * len(self.shape)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def file_bytes(self) -> int:
        return self.size + self.shape[0] * self.row_bytes


def recognises(file: File, head: bytes) -> bool:
    if head[:2] == GZIP:
        head = file.head(4, unpack=True)
    magic = len(head) >= 4 and head[:2] == b"\0\0" and head[2] in _DTYPES and 1 <= head[3] <= 8
    return magic or bool(_NAMED.search(os.path.basename(file.inside)))


def plan(files: Sequence[File], want: Want) -> Plan:
    plan = Plan()
    pairs: dict[str, dict[str, tuple[File, _Header]]] = defaultdict(dict)
    for file in files:
        try:
            header = _check_header(file)
        except DataError as error:
            plan.problems.append(str(error))
            continue
        role = "labels" if len(header.shape) == 1 else "images"
        named = re.search(r"images?|labels?", os.path.basename(file.inside), re.IGNORECASE)
        if named and named[0].lower().rstrip("s") != role.rstrip("s"):
            plan.problems.append(
                f"{file.name} holds {role}, but its name says {named[0]}: found {times(header.shape)} values; expected "
                f"{'labels, one dimension' if role == 'images' else 'images, more than one dimension'}; are two files swapped?"
            )
            continue
        pair = pairs[_ROLE_WORDS.sub("", file.inside).strip("-._").replace(".", "-")]
        # Folders often have a file both raw and gzipped: the raw one is read faster.
        if role not in pair or not file.name.endswith(".gz"):
            pair[role] = file, header
    if plan.problems:
        return plan
    _check_families(pairs, plan)
    for key, pair in pairs.items():
        split = (split_of(key) or "train") if len(pairs) > 1 else "train"
        plan.parts += _pair(pair, split, want, plan)
    return plan


def read(part: Part, want: Want) -> Iterator[Batch]:
    images, labels = part.files
    with images.unpacked() as image_stream, labels.unpacked() as label_stream:
        streams = [_Stream(images, image_stream), _Stream(labels, label_stream)]
        stop = streams[0].header.shape[0] if part.stop is None else part.stop
        if part.start:
            for stream in streams:
                stream.skip(part.start)
        for first in range(part.start, stop, want.block_rows):
            count = min(want.block_rows, stop - first)
            x, y = (stream.rows(first, count) for stream in streams)
            yield Batch({"image": x, "label": y}, Place(images.name, range(first, first + count)))
        if stop == streams[0].header.shape[0]:
            for stream in streams:
                stream.check_end()
            if part.start == 0 and not want.allow_modified:
                _check_published(streams, *part.where)


class _Stream:
    """The values of one file, in order, with a checksum of all bytes read."""

    def __init__(self, file: File, stream: BinaryIO) -> None:
        self.file, self._stream = file, stream
        self.digest = hashlib.sha256()
        with damage(file):
            self.header = _read_header(file, read_all(stream, 4 + 4 * 8))
            self._stream.seek(0)
            self.digest.update(read_all(stream, self.header.size))

    def skip(self, rows: int) -> None:
        self._stream.seek(self.header.size + rows * self.header.row_bytes)

    def rows(self, first: int, count: int) -> np.ndarray:
        with damage(self.file):
            data = read_all(self._stream, count * self.header.row_bytes)
        if len(data) < count * self.header.row_bytes:
            payload = first * self.header.row_bytes + len(data)
            found = f"{self.header.size + payload:,} bytes, {payload // self.header.row_bytes:,} whole rows"
            raise DataError(
                f"{self.file.name} is cut off: found {found}; its header says {self.header.shape[0]:,} rows, so expected "
                f"{self.header.file_bytes:,} bytes; get it again"
            )
        self.digest.update(data)
        return np.frombuffer(data, self.header.dtype).reshape(count, *self.header.shape[1:])

    def check_end(self) -> None:
        with damage(self.file):
            more = self._stream.read(1)
        if more:
            raise DataError(
                f"{self.file.name} is too long: there are bytes after the {self.header.shape[0]:,} rows that its header says; "
                f"expected {self.header.file_bytes:,} bytes in all; get it again"
            )


def _check_header(file: File) -> _Header:
    if nonsense := file.nonsense():
        hint = known.expected(file.name)
        raise DataError(nonsense + (f"; expected {hint}" if hint else ""))
    with damage(file), file.unpacked() as stream:
        header = _read_header(file, read_all(stream, 4 + 4 * 8))
    if file.head(2) != GZIP and file.size != header.file_bytes:
        problem = "cut off" if file.size < header.file_bytes else "too long"
        raise DataError(
            f"{file.name} is {problem}: found {file.size:,} bytes; its header says {times(header.shape)} values, so expected "
            f"{header.file_bytes:,} bytes; get it again"
        )
    return header


def _read_header(file: File, data: bytes) -> _Header:
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _DTYPES or not 1 <= data[3] <= 8:
        hint = known.expected(file.name)
        raise DataError(
            f"{file.name} is not IDX: found the first bytes {data[:4].hex(' ') or '(none)'}; expected 00 00 08 03 (magic 2051) "
            f"for images or 00 00 08 01 (magic 2049) for labels{f', in {hint}' if hint else ''}; get it again"
        )
    if len(data) < 4 + 4 * data[3]:
        raise DataError(
            f"{file.name} is cut off: it ends after {len(data)} bytes, within its header of {4 + 4 * data[3]} bytes; get it again"
        )
    header = _Header(np.dtype(_DTYPES[data[2]]), struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]]))
    if 0 in header.shape[1:] or header.file_bytes > _MOST_DEFLATED * max(file.size, 1):
        raise DataError(
            f"{file.name} is damaged: its header says {times(header.shape)} values, which its {file.size:,} bytes cannot hold; "
            "get it again"
        )
    return header


def _check_families(pairs: dict[str, dict[str, tuple[File, _Header]]], plan: Plan) -> None:
    """Refuses a folder of several data sets, such as all of EMNIST's."""
    names = sorted(
        {re.sub(r"(?i)(^|[^a-z0-9])(train|test|t10k|valid\w*|val)(?=[^a-z0-9]|$)", "", key).strip("-._") for key in pairs}
    )
    if len(names) > 1:
        folders = sorted({os.path.dirname(file.name) for pair in pairs.values() for file, _ in pair.values()})
        way = (
            f"name one of the folders {', '.join(folders)}"
            if len(folders) > 1
            else f"name one with a glob, {folders[0]}/*{names[-1]}*"
        )
        plan.problems.append(f"found several IDX data sets together: {', '.join(name or '(no name)' for name in names)}; {way}")


def _pair(pair: dict[str, tuple[File, _Header]], split: str, want: Want, plan: Plan) -> list[Part]:
    if len(pair) == 1:
        role, (file, _) = next(iter(pair.items()))
        other = "labels" if role == "images" else "images"
        plan.problems.append(
            f"{file.name} has no file of {other} beside it; expected one of the same name with {other} in the place of {role}"
        )
        return []
    (images, image_header), (labels, label_header) = pair["images"], pair["labels"]
    rows = image_header.shape[0]
    if rows != label_header.shape[0]:
        plan.problems.append(
            f"{images.name} has {rows:,} images, but {labels.name} has {label_header.shape[0]:,} labels; expected as many of "
            "both; get both files again from one place"
        )
        return []
    if image_header.row_bytes != want.row_size * image_header.dtype.itemsize and not want.raw:
        plan.problems.append(
            f"{images.name} has images of {times(image_header.shape[1:])}; the task expects {times(want.columns.shape)}; "
            "choose another task, or override its prepare to resize"
        )
        return []
    where = (want.title,) if want.title else ()
    # A part cannot start inside gzipped data, and the checksum of a published file needs all of it.
    if GZIP in (images.head(2), labels.head(2)) or known.published_name(images.name) or rows == 0:
        return [Part(split, "idx", (images, labels), where=where)]
    step = want.part_rows
    return [Part(split, "idx", (images, labels), first, min(first + step, rows), where) for first in range(0, rows, step)]


def _check_published(streams: Sequence[_Stream], title: str | None = None) -> None:
    """Refuses files with other content than the name promises, and images of one data set with labels of another.

    What promises is a published file name together with the published size, or the name of the data set in `data.source`.
    """
    titles = []
    for stream in streams:
        name = known.published_name(stream.file.name)
        if title is None and (name is None or stream.header.file_bytes != known.RAW_SIZES[name]):
            return
        digest = stream.digest.hexdigest()
        titles.append(known.title_of(digest))
        if titles[-1] is None:
            promise = f"is meant to be {title}'s" if title else "has the name and the size of a well-known file"
            expected = known.expected_raw(name) if name else "that of a published file"
            raise DataError(
                f"{stream.file.name} {promise} but has other content: unpacked, found sha256 {digest}; expected {expected}; get "
                "it again, or set data.allow_modified: true if other data is meant"
            )
    if titles[0] != titles[1]:
        raise DataError(
            f"{streams[0].file.name} is {titles[0]}'s, but {streams[1].file.name} is {titles[1]}'s; expected both of one data set"
        )
    if title not in (None, titles[0]):
        raise DataError(f"{streams[0].file.name} is {titles[0]}'s; expected {title}'s, which data.source names")
