"""IDX: the format of MNIST's own files, raw or gzipped."""

from __future__ import annotations

import contextlib
import gzip
import math
import re
import struct
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np

from raytrain_app.data.files import File
from raytrain_app.data.parts import Batch, Part, Place, Want
from raytrain_app.errors import DataError

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"


def recognises(file: File) -> bool:
    return bool(re.search(r"idx\d", file.inside))


def plan(files: Sequence[File], want: Want) -> list[Part]:
    by_kind: dict[str, dict[str, File]] = {}
    for file in files:
        if match := re.search(r"(train|t10k|test).*(images|labels)", file.inside):
            by_kind.setdefault("train" if match[1] == "train" else "test", {})[match[2]] = file
    return [Part(split, "idx", (pair["images"], pair["labels"])) for split, pair in by_kind.items()]


def read(part: Part, want: Want, batch_rows: int) -> Iterator[Batch]:
    with _open(part.files[0]) as images, _open(part.files[1]) as labels:
        dtype, shape = _header(images)
        label_dtype, (rows,) = _header(labels)
        if rows != shape[0]:
            raise DataError(f"{part.files[0].name} has {shape[0]} images, but {part.files[1].name} has {rows} labels")
        for first in range(0, rows, batch_rows):
            count = min(batch_rows, rows - first)
            x = np.frombuffer(images.read(count * math.prod(shape[1:]) * dtype.itemsize), dtype).reshape(count, *shape[1:])
            y = np.frombuffer(labels.read(count * label_dtype.itemsize), label_dtype)
            yield Batch({"image": x, "label": y}, Place(part.files[0].name, first))


@contextlib.contextmanager
def _open(file: File) -> Iterator[BinaryIO]:
    with file.open() as stream:
        gzipped = stream.read(2) == _GZIP
        stream.seek(0)
        yield gzip.GzipFile(fileobj=stream) if gzipped else stream  # type: ignore[misc]


def _header(stream: BinaryIO) -> tuple[np.dtype, tuple[int, ...]]:
    magic = stream.read(4)
    return np.dtype(_DTYPES[magic[2]]), struct.unpack(f">{magic[3]}I", stream.read(4 * magic[3]))
