"""Which rows are held out for validation: chosen by label and seed alone, the same share of every class."""

from __future__ import annotations

import numpy as np

from raytrain_app.data.order import permutation

_HOLD_OUT = 3


def hold_out(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows in two, stratified by label.

    The number of rows held out is `fraction` of all rows, rounded; every class gives its share, rounded down, and the
    classes with the largest remainders give one row more (the method of largest remainders).

    Args:
        labels: label of each row, any integer dtype, shape (rows,).
        fraction: share of the rows to hold out, in [0, 1).
        seed: the job's seed, at least 0.

    Returns:
        (kept, held out): disjoint row numbers, int64, each ascending, together all rows.
    """
    _, class_of_row, counts = np.unique(labels, return_inverse=True, return_counts=True)
    shares = counts * fraction
    wanted = np.floor(shares).astype(np.int64)
    missing = round(len(labels) * fraction) - int(wanted.sum())
    wanted[np.argsort(wanted - shares, kind="stable")[:missing]] += 1
    shuffled = permutation(len(labels), seed, _HOLD_OUT)
    by_class = shuffled[np.argsort(class_of_row[shuffled], kind="stable")]
    first_of_class = np.cumsum(counts) - counts
    held = np.zeros(len(labels), bool)
    for first, number in zip(first_of_class, wanted, strict=True):
        held[by_class[first : first + number]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)
