"""Global batches: which rows a step takes, and the content of those that are a worker's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from raytrain_app.data import Reader, Split, epoch_order
from raytrain_app.elastic.plan import training_rows
from raytrain_app.elastic.progress import steps_per_epoch
from raytrain_app.job import Job


@dataclass(frozen=True)
class Batch:
    """A global batch, and one worker's part of it.

    Attributes:
        rows: row ids of the whole batch.
        mine: those of the worker's shards.
        first: place of the first of them in the batch.
        x, y: their content.
    """

    rows: np.ndarray
    mine: np.ndarray
    first: int
    x: np.ndarray
    y: np.ndarray


class Batches:
    """The batches of a run in order; which rows are in one follows from the job and the step alone.

    Attributes:
        num_steps: steps of an epoch.
    """

    def __init__(self, job: Job, split: Split) -> None:
        self._job, self._split = job, split
        self.num_steps = steps_per_epoch(len(split), job.train.global_batch_size)
        self._readers: dict[int, Reader] = {}
        self._order: tuple[int, np.ndarray] | None = None

    def read(self, step: int, shards: range) -> Batch:
        """Reads the rows of consecutive shards of a step's batch, and asks for those of the next one."""
        reader = self.reader(self._split)
        rows, num_shards = self._rows(step), self._job.num_shards
        span = _span(len(rows), num_shards, shards)
        mine = rows[span]
        x, y = reader.rows(mine)
        if (step + 1) % self.num_steps:
            upcoming = self._rows(step + 1)
            reader.prefetch(upcoming[_span(len(upcoming), num_shards, shards)])
        return Batch(rows, mine, span.start, x, y)

    def reader(self, split: Split) -> Reader:
        """One reader a set of blocks, which train and validation rows may share."""
        if id(split.blocks) not in self._readers:
            self._readers[id(split.blocks)] = Reader(split.blocks)
        return self._readers[id(split.blocks)]

    def _rows(self, step: int) -> np.ndarray:
        """Row ids of the global batch of `step`."""
        epoch, size = step // self.num_steps, self._job.train.global_batch_size
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self._split, self._job.train.seed, epoch, self._job.data.order)
        start = (step - epoch * self.num_steps) * size
        return self._order[1][start : start + size]


@lru_cache
def _span(num_rows: int, num_shards: int, shards: range) -> slice:
    """Places in a batch of the rows of consecutive shards."""
    first, last = (training_rows(num_rows, num_shards, shard) for shard in (shards[0], shards[-1]))
    return slice(first.start, last.stop)
