"""Turns raw rows into checked rows: `x` of the task's shape and dtype, `y` a class number. Pure functions of arrays."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from raytrain_app.data.decode import BadImageError, decode
from raytrain_app.data.files import first_line
from raytrain_app.data.parts import Batch, Want, times
from raytrain_app.errors import DataError

Prepare = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Checked:
    """Rows of the task's shape and dtype, and which of them are bad.

    Attributes:
        x: shape (rows, *shape); read-only, and may share the memory of what was read.
        y: int64, shape (rows,).
        bad: what is wrong with a row and where it comes from, by row.
    """

    x: np.ndarray
    y: np.ndarray
    bad: dict[int, str]


def check_rows(batch: Batch, want: Want, prepare: Prepare | None = None) -> Checked:
    """Brings raw rows into the task's form and finds the bad ones.

    Args:
        batch: what a format has read.
        want: what the task expects.
        prepare: the task's own preparation of the raw columns.

    Raises:
        DataError: no row can be right: a column is missing, shape or type are not the task's, or `prepare` failed.
    """
    columns = dict(batch.columns)
    rows = len(next(iter(columns.values()))) if columns else 0
    if prepare is not None:
        columns = _prepared(columns, prepare, batch, rows)
    raw_x, raw_y = (_column(columns, names, batch) for names in (want.columns.x_names, want.columns.y_names))
    if not len(raw_x) == len(raw_y) == rows:
        raise DataError(
            f"{_where(batch)}: the task's prepare made {len(raw_x)} rows of x and {len(raw_y)} of y out of {rows} rows; expected "
            "as many as it was given"
        )
    bad = dict(batch.bad)
    x = _inputs(raw_x, want, batch, bad)
    y = _labels(raw_y, want, batch, bad)
    return Checked(x, y, {row: f"{batch.place.of(row)}: {bad[row]}" for row in sorted(bad)})


def _where(batch: Batch) -> str:
    return batch.place.file or (batch.place.files[0] if batch.place.files else "data.source")


def _prepared(columns: dict[str, np.ndarray], prepare: Prepare, batch: Batch, rows: int) -> dict[str, np.ndarray]:
    try:
        return {name: np.asarray(values) for name, values in prepare(columns).items()}
    except Exception as error:  # The task's own code may raise anything.
        trace, line = error.__traceback__, "?"
        while trace is not None:
            line, trace = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}", trace.tb_next
        raise DataError(
            f"{_where(batch)}: the task's prepare raised {type(error).__name__}: {first_line(error)} (at {line}); it was given "
            f"{rows} rows of columns {', '.join(f'{name} ({values.dtype})' for name, values in list(columns.items())[:8])}"
        ) from None


def _column(columns: Mapping[str, np.ndarray], names: tuple[str, ...], batch: Batch) -> np.ndarray:
    for name in names:
        if name in columns:
            return columns[name]
    found = ", ".join(list(columns)[:8]) + (", ..." if len(columns) > 8 else "")
    raise DataError(
        f"{_where(batch)}: found columns {found or '(none)'}; expected one named {' or '.join(names)}; rename it, or override "
        "the task's prepare"
    )


def _inputs(raw: np.ndarray, want: Want, batch: Batch, bad: dict[int, str]) -> np.ndarray:
    shape, dtype, rows = want.columns.shape, np.dtype(want.columns.dtype), len(raw)
    if raw.dtype == object:
        raw = _from_objects(raw, want, bad)
    if raw.dtype.kind not in "uifb":
        raise DataError(f"{_where(batch)}: x has the type {raw.dtype}; expected numbers that fit {dtype}")
    if not _fits(raw.shape[1:], shape):
        raise DataError(
            f"{_where(batch)}: found x of {times(raw.shape[1:])}; the task expects {times(shape)}; override its prepare to resize"
        )
    flat = raw.reshape(rows, want.row_size)
    _find_bad_values(flat, dtype, batch, bad)
    x = flat.reshape(rows, *shape)
    if want.transpose:
        x = x.swapaxes(1, 2)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.ascontiguousarray(x, dtype)


def _fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether rows of shape `found` are rows of `shape`: flat, or equal but for axes of length 1."""
    size = int(np.prod(shape, dtype=np.int64))
    return found == (size,) or [n for n in found if n != 1] == [n for n in shape if n != 1]


def _find_bad_values(flat: np.ndarray, dtype: np.dtype, batch: Batch, bad: dict[int, str]) -> None:
    """Finds values that are not finite or that `dtype` cannot hold, in arrays of shape (rows, values)."""
    if not flat.size or flat.dtype == dtype == np.uint8:
        return
    wrong = np.zeros(flat.shape, bool)
    if flat.dtype.kind == "f":
        wrong |= ~np.isfinite(flat)
    if dtype.kind in "ui" and flat.dtype != dtype:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        if flat.dtype.kind == "f":
            fractional = flat != np.floor(flat)
            if fractional.any() and np.nanmin(flat) >= 0 and np.nanmax(flat) <= 1:
                raise DataError(
                    f"{_where(batch)}: the values of x are fractions between 0 and 1; the task expects whole numbers "
                    f"{low}..{high}; multiply them by {high} in the task's prepare, or give its columns a float dtype"
                )
            wrong |= fractional
        wrong |= (flat < low) | (flat > high)
    elif dtype.kind == "f":
        wrong |= np.abs(flat.astype(np.float64)) > np.finfo(dtype).max
    for row in np.flatnonzero(wrong.any(axis=1)):
        at = int(np.argmax(wrong[row]))
        wanted = "a finite number" if dtype.kind == "f" else f"a whole number in {np.iinfo(dtype).min}..{np.iinfo(dtype).max}"
        bad.setdefault(int(row), f"value {at} of x is {flat[row, at]}; expected {wanted}")


def _from_objects(raw: np.ndarray, want: Want, bad: dict[int, str]) -> np.ndarray:
    """Decodes rows that are image files or lists of numbers; those that cannot be are bad and all zeros."""
    good: dict[int, np.ndarray] = {}
    for row, value in enumerate(raw):
        if row in bad:
            continue
        try:
            good[row] = _one(value, want)
        except BadImageError as error:
            bad[row] = str(error)
    dtype = np.result_type(*{array.dtype for array in good.values()}) if good else np.dtype(np.uint8)
    rows = np.zeros((len(raw), want.row_size), dtype)
    for row, array in good.items():
        rows[row] = array.ravel()
    return rows


def _one(value: object, want: Want) -> np.ndarray:
    if isinstance(value, dict):
        value = value.get("bytes")
    if value is None:
        raise BadImageError("there is no value for x")
    if isinstance(value, bytes):
        return decode(value, want.columns.shape)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            array = np.asarray(value)
    except (ValueError, TypeError, Warning):
        array = np.asarray(None)
    if array.dtype.kind not in "uifb":
        raise BadImageError(f"x is {type(value).__name__} {str(value)[:40]!r}; expected numbers or an encoded image")
    if not _fits(array.shape, want.columns.shape):
        raise BadImageError(f"found x of {times(array.shape)}; expected {times(want.columns.shape)}")
    return array


def _labels(raw: np.ndarray, want: Want, batch: Batch, bad: dict[int, str]) -> np.ndarray:
    if want.one_hot:
        return _one_hot(raw, want, batch, bad)
    if raw.ndim == 2 and raw.shape[1] == 1:
        raw = raw[:, 0]
    if raw.ndim != 1:
        raise DataError(
            f"{_where(batch)}: the label has {times(raw.shape[1:])} values a row; expected one class number"
            + ("; if it is one-hot, set data.one_hot: true" if raw.ndim == 2 else "")
        )
    values = raw.astype(np.float64) if raw.dtype.kind in "uifb" else _label_numbers(raw, bad)
    low, high = want.labels
    with np.errstate(invalid="ignore"):
        whole = np.isfinite(values) & (values == np.floor(values))
        right = whole & (values >= low) & (values <= high)
    for row in np.flatnonzero(~right):
        label = int(values[row]) if whole[row] and abs(values[row]) < 2**53 else values[row]
        bad.setdefault(int(row), f"label {label} is not {f'in {low}..{high}' if whole[row] else 'a whole number'}")
    return np.where(right, values, low).astype(np.int64) - low


def _label_numbers(raw: np.ndarray, bad: dict[int, str]) -> np.ndarray:
    numbers = np.zeros(len(raw))
    for row, value in enumerate(raw):
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        try:
            numbers[row] = float(text)
        except (TypeError, ValueError):
            bad.setdefault(row, "there is no label" if value is None else f"label {str(text)[:40]!r} is no number")
            numbers[row] = np.nan
    return numbers


def _one_hot(raw: np.ndarray, want: Want, batch: Batch, bad: dict[int, str]) -> np.ndarray:
    classes = want.columns.num_classes
    if raw.ndim != 2 or raw.shape[1] != classes or raw.dtype.kind not in "uifb":
        found = f"{times(raw.shape[1:])} values a row of type {raw.dtype}"
        raise DataError(f"{_where(batch)}: the label has {found}; expected {classes} numbers with data.one_hot: true")
    right = ((raw == 0) | (raw == 1)).all(axis=1) & ((raw == 1).sum(axis=1) == 1)
    for row in np.flatnonzero(~right):
        bad.setdefault(int(row), f"the one-hot label is {raw[row].tolist()}; expected one 1 and zeros")
    return np.asarray(np.argmax(raw, axis=1), np.int64)
