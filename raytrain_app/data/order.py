"""In which order an epoch takes its rows: a pure function of the split, the seed and the epoch.

Only the raw 64-bit streams of numpy's bit generators are promised to stay the same between numpy versions (NEP 19), so
permutations are made from those and from nothing else.
"""

from __future__ import annotations

import numpy as np

from raytrain_app.data.blocks import Split

_ROWS, _BLOCKS = 1, 2


def epoch_order(split: Split, seed: int, epoch: int, mode: str) -> np.ndarray:
    """The split's row numbers in the order in which an epoch takes them.

    Args:
        split: the rows; every one of them is in the result exactly once.
        seed: the job's seed, at least 0.
        epoch: counted from 0.
        mode: "global", all rows permuted; or "windowed", the blocks permuted and then the rows within each window of
            `split.blocks.window` blocks, so that few blocks are in use at a time.

    Returns:
        int64 array of the split's length.
    """
    if mode == "global" or not split.blocks.window:
        return np.asarray(split.ids[permutation(len(split), seed, epoch, _ROWS)])
    starts = np.asarray(split.blocks.starts)
    blocks = permutation(len(starts) - 1, seed, epoch, _BLOCKS)
    window_of_block = np.empty(len(blocks), np.int64)
    window_of_block[blocks] = np.arange(len(blocks)) // split.blocks.window
    shuffled = split.ids[permutation(len(split), seed, epoch, _ROWS)]
    windows = window_of_block[np.searchsorted(starts, shuffled, side="right") - 1]
    order: np.ndarray = shuffled[np.argsort(windows, kind="stable")]
    return order


def permutation(size: int, seed: int, *key: int) -> np.ndarray:
    """A permutation of 0..size-1 that depends on `size`, `seed` and `key` alone, on any machine and numpy version.

    Sorting random 64-bit keys gives every permutation the same chance, but for equal keys, which are left in place: for
    a billion rows the chance that there is a single such pair is 3 percent.
    """
    stream = np.random.Philox(np.random.SeedSequence(seed, spawn_key=key))
    return np.argsort(stream.random_raw(size), kind="stable")
