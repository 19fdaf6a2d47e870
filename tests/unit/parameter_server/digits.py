"""The digits that come with the package, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import pyarrow.parquet as pq


@dataclass(frozen=True)
class Digits:
    """x uint8 (rows, 28, 28) and y int64 (rows,) of both splits."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def embedded_digits() -> Digits:
    """All 10,000 of them."""
    table = pq.read_table(str(files("raytrain_app.data") / "embedded" / "mnist-10k.parquet"))
    x = np.array(table["image"].to_pylist(), np.uint8).reshape(-1, 28, 28)
    y = table["label"].to_numpy().astype(np.int64)
    train = np.array(table["split"].to_pylist()) == "train"
    return Digits(x[train], y[train], x[~train], y[~train])
