"""NumPy's `.npz`: Keras's keys (x_train, y_train, x_test, y_test) and MedMNIST's (train_images, train_labels, ...)."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from raytrain_app.data.files import File, damage, first_line, read_all
from raytrain_app.data.known import KERAS_NPZ
from raytrain_app.data.parts import SPLITS, Batch, Part, Place, Plan, Want, split_of, times
from raytrain_app.errors import DataError

_KEYS = "x_train and y_train (x_test, y_test), or train_images and train_labels (test_images, test_labels)"
_X_WORDS, _Y_WORDS = {"x", "image", "images", "data"}, {"y", "label", "labels", "target", "targets"}


def recognises(file: File, head: bytes) -> bool:
    return head[:4] == b"PK\x03\x04" or file.inside.lower().endswith(".npz")


def plan(files: Sequence[File], want: Want) -> Plan:
    plan = Plan()
    for file in files:
        try:
            _check_published(file, want)
            plan.parts += _parts(file, want, split_of(file.inside) if len(files) > 1 else None)
        except DataError as error:
            plan.problems.append(str(error))
    return plan


def read(part: Part, want: Want) -> Iterator[Batch]:
    (file,) = part.files
    x_key, y_key = part.where
    with contextlib.ExitStack() as stack:
        stack.enter_context(damage(file))
        archive = stack.enter_context(_archive(file, stack.enter_context(file.open())))
        x, y = (stack.enter_context(_Array(file, archive, key)) for key in (x_key, y_key))
        for first in range(0, x.rows, want.block_rows):
            count = min(want.block_rows, x.rows - first)
            place = Place(f"{file.name}, {x_key}", range(first, first + count))
            yield Batch({"image": x.take(count), "label": y.take(count)}, place)


class _Array:
    """One array of the archive, read in order; its pickles are never opened."""

    def __init__(self, file: File, archive: zipfile.ZipFile, key: str) -> None:
        self._file, self._key = file, key
        try:
            info = archive.getinfo(f"{key}.npy")
            self._stream = archive.open(info)
            self.shape, self.dtype = _npy_header(self._stream)
        except (zipfile.BadZipFile, zlib.error, ValueError, SyntaxError, NotImplementedError, EOFError, RuntimeError) as error:
            raise self._damaged(first_line(error)) from None
        if self.dtype.hasobject:
            raise DataError(
                f"{file.name}: {key} has Python objects (dtype object), which are never loaded; save it with a numeric dtype"
            )
        found, expected = info.file_size - self._stream.tell(), math.prod(self.shape) * self.dtype.itemsize
        if found != expected:
            raise self._damaged(f"its header says {times(self.shape)} of {self.dtype}, {expected:,} bytes; found {found:,}")

    def __enter__(self) -> _Array:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stream.close()

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 0

    def take(self, count: int) -> np.ndarray:
        """The next `count` rows."""
        size = count * math.prod(self.shape[1:]) * self.dtype.itemsize
        try:
            data = read_all(self._stream, size)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise self._damaged(first_line(error)) from None
        if len(data) < size:
            raise self._damaged(f"it ends {size - len(data):,} bytes too early")
        return np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self._file.name}: array {self._key} is damaged: {why}; get the file again")


def _npy_header(stream: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version[0]}.{version[1]} of .npy is not known")
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = header(stream)
    if fortran and len(shape) > 1:
        raise ValueError("it is in Fortran order; save numpy.ascontiguousarray of it")
    if any(size < 0 for size in shape):
        raise ValueError(f"its header says the shape {shape}")
    return shape, dtype


def _archive(file: File, stream: Any) -> zipfile.ZipFile:
    if nonsense := file.nonsense():
        raise DataError(nonsense)
    try:
        return zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
        raise DataError(f"{file.name} is cut off, damaged, or no .npz file ({first_line(error)}); get it again") from None


def _parts(file: File, want: Want, file_split: str | None) -> list[Part]:
    with damage(file), file.open() as stream, _archive(file, stream) as archive:
        keys = [name.removesuffix(".npy") for name in archive.namelist()]
        parts = []
        for split in (*SPLITS, None):
            mine = [key for key in keys if split_of(key) == split]
            xs, ys = ([key for key in mine if words & set(key.lower().split("_"))] for words in (_X_WORDS, _Y_WORDS))
            if len(xs) == len(ys) == 1:
                _check_pair(file, archive, xs[0], ys[0], want)
                parts.append(Part(split or file_split or "train", "npz", (file,), where=(xs[0], ys[0])))
    if not parts or (file_split is None and all(part.split != "train" for part in parts)):
        raise DataError(f"{file.name} has the arrays {', '.join(keys) or '(none)'}; expected {_KEYS}, or x and y")
    return parts


def _check_pair(file: File, archive: zipfile.ZipFile, x_key: str, y_key: str, want: Want) -> None:
    with _Array(file, archive, x_key) as x, _Array(file, archive, y_key) as y:
        if x.rows != y.rows:
            raise DataError(f"{file.name}: {x_key} has {x.rows:,} rows, but {y_key} has {y.rows:,}; expected as many in both")
        if math.prod(x.shape[1:]) != want.row_size and not want.raw:
            raise DataError(
                f"{file.name}: {x_key} has rows of {times(x.shape[1:])}; the task expects {times(want.columns.shape)}"
            )


def _check_published(file: File, want: Want) -> None:
    name, size, sha256 = KERAS_NPZ
    if os.path.basename(file.name) != name or file.size != size or want.allow_modified:
        return
    with damage(file), file.open() as stream:
        found = hashlib.sha256(stream.read()).hexdigest()
    if found != sha256:
        raise DataError(
            f"{file.name} has the name and the size of Keras's MNIST file but other content: found sha256 {found}; expected "
            f"{sha256}; get it again, or set data.allow_modified: true if it is meant to be other data"
        )
