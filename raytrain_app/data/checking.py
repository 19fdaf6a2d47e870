"""Reads a part and lets only good rows through, in blocks of equal size, with an account of the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from raytrain_app.data.formats import FORMATS
from raytrain_app.data.parts import Part, Want
from raytrain_app.data.rows import Prepare, check_rows
from raytrain_app.errors import DataError

MAX_EXAMPLES = 10


@dataclass
class Findings:
    """What was found while a block was read.

    Attributes:
        rows: rows of the block, all good.
        sha256: checksum (hex) of the block's rows in order.
        bad: number of bad rows, which are not in the block.
        examples: where the first of them are and what is wrong with each.
        error: why reading ended before the end of the part; empty if it did not.
    """

    rows: int = 0
    sha256: str = ""
    bad: int = 0
    examples: list[str] = field(default_factory=list)
    error: str = ""

    def add_bad(self, texts: list[str], number: int | None = None) -> None:
        """Counts bad rows, by default as many as there are texts, and keeps the first few texts."""
        self.bad += len(texts) if number is None else number
        self.examples += texts[: MAX_EXAMPLES - len(self.examples)]


@dataclass(frozen=True)
class GoodRows:
    """A block: x of shape (rows, *shape), y int64 of shape (rows,), and what was found while reading it."""

    x: np.ndarray
    y: np.ndarray
    findings: Findings


def good_rows(part: Part, want: Want, prepare: Prepare | None = None) -> Iterator[GoodRows]:
    """Reads and checks a part.

    Yields:
        Blocks of exactly `want.block_rows` rows, and a smaller last one; at least one block, which may be empty. Where the
        part is damaged, the last block's findings say so and what comes after is missing.
    """
    buffer = _Buffer(want)
    findings, last = Findings(), None
    try:
        for batch in FORMATS[part.format].read(part, want):
            checked = check_rows(batch, want, prepare)
            findings.add_bad([*batch.lost, *checked.bad.values()])
            good = np.ones(len(checked.y), bool)
            good[list(checked.bad)] = False
            whole = bool(good.all())
            buffer.add(checked.x if whole else checked.x[good], checked.y if whole else checked.y[good])
            while buffer.rows >= want.block_rows:
                if last is not None:
                    yield last
                last, findings = buffer.take(want.block_rows, findings), Findings()
    except DataError as error:
        findings.error = str(error)
    if buffer.rows or last is None:
        if last is not None:
            yield last
        last = buffer.take(buffer.rows, findings)
    else:
        last.findings.add_bad(findings.examples, findings.bad)
        last.findings.error = findings.error
    yield last


class _Buffer:
    """Rows that wait for a full block. Batches that are full blocks pass through without a copy."""

    def __init__(self, want: Want) -> None:
        self.rows = 0
        self._xs = [np.empty((0, *want.columns.shape), want.columns.dtype)]
        self._ys = [np.empty(0, np.int64)]

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        if len(y):
            self._xs.append(x)
            self._ys.append(y)
            self.rows += len(y)

    def take(self, rows: int, findings: Findings) -> GoodRows:
        """The oldest rows as a block; they leave the buffer."""
        xs, ys = ([a for a in arrays if len(a)] or arrays[:1] for arrays in (self._xs, self._ys))
        x, y = (arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for arrays in (xs, ys))
        self._xs, self._ys, self.rows = [x[rows:]], [y[rows:]], self.rows - rows
        findings.rows, findings.sha256 = rows, sha256_of(x[:rows], y[:rows])
        return GoodRows(x[:rows], y[:rows], findings)


def sha256_of(x: np.ndarray, y: np.ndarray) -> str:
    """Checksum (hex) of rows: the bytes of x, then those of y, little-endian."""
    digest = hashlib.sha256(np.ascontiguousarray(x, x.dtype.newbyteorder("<")).data)
    digest.update(np.ascontiguousarray(y, "<i8").data)
    return digest.hexdigest()
