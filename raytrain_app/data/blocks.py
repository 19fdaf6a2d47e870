"""What loading gives: blocks of checked rows in Ray's object store, and the rows of them that each split has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa
    from ray import ObjectRef


@dataclass(frozen=True)
class Blocks:
    """Rows in the object store, cut in blocks. Row numbers run from 0 through all blocks.

    Attributes:
        refs: one reference a block, to an Arrow table with a fixed shape tensor column `x` and an int64 column `y`.
        starts: row number of each block's first row, then the number of all rows.
        shape: shape of one `x`.
        dtype: numpy name of the dtype of `x`.
        window: blocks that one window of the windowed order has, and that a reader keeps mapped; 0 means all blocks.
    """

    refs: tuple[ObjectRef[pa.Table], ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    window: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of all blocks together."""
        return self.starts[-1]


@dataclass(frozen=True)
class Split:
    """The rows of one split.

    Attributes:
        blocks: where the rows are; the train and validation split share theirs.
        ids: row numbers in `blocks`, int64, ascending.
    """

    blocks: Blocks
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Dataset:
    """All that a run trains and is evaluated on.

    Attributes:
        train: never empty.
        validation: None if the job asks for no validation rows and the source has none.
        test: None if the source has no test rows.
        notes: what the user should know, such as a missing test split or the number of rows dropped; one sentence each.
        fingerprint: sha256 (hex) of shape, dtype and all rows in order; equal for equal data read in equal blocks.
        dropped: number of bad rows that were left out because the job says so.
    """

    train: Split
    validation: Split | None
    test: Split | None
    notes: tuple[str, ...]
    fingerprint: str
    dropped: int = 0
