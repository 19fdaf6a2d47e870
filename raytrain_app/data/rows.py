"""Turns raw rows into checked rows: `x` of the task's shape and dtype, `y` a class number. Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from raytrain_app.data.parts import Batch, Want
from raytrain_app.errors import DataError

Prepare = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Checked:
    """Rows of the task's shape and dtype, and which of them are bad.

    Attributes:
        x: shape (rows, *shape).
        y: int64, shape (rows,).
        bad: what is wrong with a row and where it comes from, by row.
    """

    x: np.ndarray
    y: np.ndarray
    bad: dict[int, str]


def check_rows(batch: Batch, want: Want, prepare: Prepare | None = None) -> Checked:
    """Brings raw rows into the task's form and finds the bad ones.

    Raises:
        DataError: no row can be right: a column is missing, or shape or type are not the task's.
    """
    columns = dict(batch.columns)
    if prepare is not None:
        columns = dict(prepare(columns))
    place = batch.place.of
    raw_x, raw_y = _column(columns, want.columns.x_names, place), _column(columns, want.columns.y_names, place)
    bad = dict(batch.bad)
    x = _inputs(raw_x, want, place, bad)
    y = _labels(raw_y, want, place, bad)
    return Checked(x, y, {row: f"{place(row)}: {bad[row]}" for row in sorted(bad)})


def _column(columns: Mapping[str, np.ndarray], names: tuple[str, ...], place: Callable[[int], str]) -> np.ndarray:
    for name in names:
        if name in columns:
            return columns[name]
    raise DataError(
        f"{place(0)}: found columns {', '.join(columns) or 'none'}; expected one named {' or '.join(names)}; rename it, or "
        "override the task's prepare"
    )


def _inputs(raw: np.ndarray, want: Want, place: Callable[[int], str], bad: dict[int, str]) -> np.ndarray:
    columns, rows = want.columns, len(raw)
    if raw.size != rows * want.row_size:
        raise DataError(f"{place(0)}: found x of shape {raw.shape[1:]}; expected {columns.shape}")
    x = raw.reshape(rows, *columns.shape)
    if want.transpose:
        x = x.swapaxes(1, 2)
    return np.ascontiguousarray(x, columns.dtype)


def _labels(raw: np.ndarray, want: Want, place: Callable[[int], str], bad: dict[int, str]) -> np.ndarray:
    y = raw.astype(np.int64) - want.label_offset
    for row in np.flatnonzero((y < 0) | (y >= want.columns.num_classes)):
        bad.setdefault(int(row), f"label {raw[row]} is not in 0..{want.columns.num_classes - 1}")
    return y
