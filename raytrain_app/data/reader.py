"""Rows out of the object store at the speed of memory."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError

from raytrain_app.data.blocks import Blocks

Rows = tuple[np.ndarray, np.ndarray]
Value = TypeVar("Value")

# Below this a copy of mapped rows is done sooner than a thread is woken up for it.
_BACKGROUND_BYTES = 1 << 20
_FIRST_WAIT_S = 1.0


class Reader:
    """Reads any rows of `blocks`, in any order, in any process of the cluster.

    Blocks are mapped from the object store of the worker's node, never copied as a whole; a block on another node is
    fetched once a node. Of the mapped blocks the most recently used are kept.

    Args:
        blocks: what to read from.
        max_blocks: how many blocks to keep mapped, at least 1; by default as many as the order needs at a time.

    Attributes:
        mapped: arrays of the blocks that are mapped now, by block number, least recently used first.
    """

    def __init__(self, blocks: Blocks, max_blocks: int | None = None) -> None:
        self._blocks = blocks
        self._starts = np.asarray(blocks.starts)
        self._row_bytes = int(np.prod(blocks.shape)) * np.dtype(blocks.dtype).itemsize
        self._max_blocks = max_blocks or blocks.window or len(blocks.refs)
        self.mapped: OrderedDict[int, Rows] = OrderedDict()
        self._lock = Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[np.ndarray, Future[Rows]] | None = None

    def rows(self, ids: np.ndarray) -> Rows:
        """The rows with the numbers `ids`, in that order.

        Args:
            ids: row numbers, int64, shape (n,); each in [0, blocks.num_rows), else IndexError.

        Returns:
            x of shape (n, *blocks.shape) in the stored dtype and y int64 of shape (n,): contiguous, writable copies.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and np.array_equal(ahead[0], ids):
            return ahead[1].result()
        return self._gather(ids)

    def prefetch(self, ids: np.ndarray) -> None:
        """Starts to gather in the background what `rows(ids)` will return; a second call replaces the first.

        Does nothing if the rows are few and in mapped blocks, when `rows` would be ready before a thread has started.
        """
        if len(ids) * self._row_bytes <= _BACKGROUND_BYTES and self._are_mapped(ids):
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "reader")
        self._ahead = ids.copy(), self._thread.submit(self._gather, ids.copy())

    def _are_mapped(self, ids: np.ndarray) -> bool:
        """Whether all blocks of these rows are mapped."""
        if len(self.mapped) == len(self._blocks.refs):
            return True
        return all(block in self.mapped for block in np.unique(self._block_of(ids)))

    def _block_of(self, ids: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._starts, ids, side="right") - 1

    def _gather(self, ids: np.ndarray) -> Rows:
        # Looked at once: without a sign, negative numbers are too large.
        if len(ids) and ids.astype(np.int64, copy=False).view(np.uint64).max() >= self._blocks.num_rows:
            raise IndexError(f"row numbers {ids.min()}..{ids.max()} are not all in 0..{self._blocks.num_rows - 1}")
        with self._lock:
            if len(self._blocks.refs) == 1:
                x, y = self._block(0)
                return x.take(ids, axis=0), y.take(ids)
            return self._gather_from_blocks(ids)

    def _gather_from_blocks(self, ids: np.ndarray) -> Rows:
        """Takes the rows block by block, one copy each, and then brings them into the order asked for, one more."""
        block_of = self._block_of(ids)
        by_block = np.argsort(block_of, kind="stable")
        blocks, ids = block_of[by_block], ids[by_block]
        xs, ys = np.empty((len(ids), *self._blocks.shape), self._blocks.dtype), np.empty(len(ids), np.int64)
        first = 0
        for stop in [*(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(ids)] if len(ids) else []:
            x, y = self._block(int(blocks[first]))
            inside = ids[first:stop] - self._starts[blocks[first]]
            # The ids are known to be in range; numpy copies once more into `out` if it has to check them itself.
            x.take(inside, axis=0, out=xs[first:stop], mode="clip")
            y.take(inside, out=ys[first:stop], mode="clip")
            first = stop
        place = np.empty_like(by_block)
        place[by_block] = np.arange(len(by_block))
        return xs.take(place, axis=0), ys.take(place)

    def _block(self, number: int) -> Rows:
        if number in self.mapped:
            self.mapped.move_to_end(number)
            return self.mapped[number]
        while len(self.mapped) >= self._max_blocks:
            self.mapped.popitem(last=False)
        self.mapped[number] = arrays(fetch([self._blocks.refs[number]])[0], self._blocks.shape)
        return self.mapped[number]


def fetch(references: Sequence[ray.ObjectRef[Value]]) -> list[Value]:
    """The values, out of the object store of whichever nodes have them; blocks until they are on this node.

    Ray knows late that a node is gone. Until then it may choose that one of several to fetch from, and waits 10 s for it.
    Who asks again sooner has another choice made; each wait is twice as long as the last, so a slow network has its time too.
    """
    for attempt in itertools.count():
        try:
            return ray.get(list(references), timeout=_FIRST_WAIT_S * 2**attempt)
        except GetTimeoutError:
            continue
    raise AssertionError("it counts without end")


def bring_here(blocks: Blocks) -> None:
    """Fetches the blocks to this node, as a later `Reader` maps them: all, unless the order is windowed."""
    if not blocks.window:
        fetch(blocks.refs)


def arrays(table: pa.Table, shape: tuple[int, ...]) -> Rows:
    """The columns of a block as numpy arrays that share its memory; read-only."""
    x, y = table.column("x").chunk(0), table.column("y").chunk(0)
    return x.to_numpy_ndarray().reshape(-1, *shape), y.to_numpy()
