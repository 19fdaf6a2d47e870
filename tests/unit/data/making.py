"""Small sources in every format, and a way to read them without Ray."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_app.data.checking import good_rows
from raytrain_app.data.load import plan_data, wanted
from raytrain_app.job import Data
from raytrain_app.task import Columns, Task

_CODES = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}


class Digits(Task):
    """4 x 4 images in ten classes: small enough to write by hand."""

    columns = Columns(shape=(4, 4), dtype="uint8", num_classes=10)


class Floats(Task):
    columns = Columns(shape=(4, 4), dtype="float32", num_classes=10)


def images(rows: int, seed: int = 0, size: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, size, size)).astype(np.uint8)


def labels(rows: int) -> np.ndarray:
    return (np.arange(rows) % 10).astype(np.uint8)


def idx_bytes(values: np.ndarray) -> bytes:
    head = struct.pack(f">BBBB{values.ndim}I", 0, 0, _CODES[values.dtype.name], values.ndim, *values.shape)
    return head + values.astype(values.dtype.newbyteorder(">")).tobytes()


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)
    return path


def write_idx(folder: Path, rows: int = 20, test_rows: int = 10, gz: str = "", size: int = 4) -> Path:
    """MNIST's four files, named as published."""
    for split, number, seed in (("train", rows, 0), ("t10k", test_rows, 1)):
        if number:
            write(folder / f"{split}-images-idx3-ubyte{gz}", idx_bytes(images(number, seed, size)))
            write(folder / f"{split}-labels-idx1-ubyte{gz}", idx_bytes(labels(number)))
    return folder


@dataclass
class Scan:
    """Everything that reading gave: good rows by split, problems found before and while reading, bad rows."""

    rows: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """The only problem."""
        (problem,) = self.problems
        return problem


def scan(source: Path | str, task: Task | None = None, **data: Any) -> Scan:
    """Plans and reads a source in this process."""
    task, section = task or Digits(), Data(source=str(source), **data)
    want = wanted(section, task)
    plan = plan_data(section, task, want)
    result = Scan(problems=list(plan.problems), notes=plan.notes)
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for part in plan.parts if not plan.problems else []:
        for rows in good_rows(part, want, task.prepare if want.raw else None):
            found.setdefault(part.split, []).append((rows.x, rows.y))
            result.bad += rows.findings.examples
            result.problems += [rows.findings.error] if rows.findings.error else []
    result.rows = {
        split: (np.concatenate([x for x, _ in some]), np.concatenate([y for _, y in some])) for split, some in found.items()
    }
    return result


def assert_rows(result: Scan, expected: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """The scan found nothing wrong, and exactly these rows."""
    assert (result.problems, result.bad) == ([], [])
    assert set(result.rows) == set(expected)
    for split, (x, y) in expected.items():
        np.testing.assert_array_equal(result.rows[split][0], x)
        np.testing.assert_array_equal(result.rows[split][1], y)


DIGITS = Digits()
