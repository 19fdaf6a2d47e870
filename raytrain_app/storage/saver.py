"""Checkpoints behind the training loop's back: it is held for the copy only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from raytrain_app.errors import RaytrainError
from raytrain_app.state import TrainState
from raytrain_app.storage.checkpoints import CheckpointStore

T = TypeVar("T")


class Saver:
    """Writes one checkpoint at a time in a background thread.

    Args:
        store: where checkpoints go.
        tell: called from the background thread with the event's kind and details.
    """

    def __init__(self, store: CheckpointStore, tell: Callable[..., None]) -> None:
        self._store, self._tell = store, tell
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._outstanding: Future[None] | None = None

    def save(self, step: int, snapshot: Callable[[], TrainState], metrics: Mapping[str, float]) -> None:
        """Takes a copy of the state; waits before only while the last checkpoint is still being written."""
        kept = dict(metrics)
        self.run(step, snapshot, lambda state: self._store.save(step, state, kept))

    def run(self, step: int, take: Callable[[], T], write: Callable[[T], str]) -> None:
        """The same for whatever `take` returns; `write` returns the checkpoint's URI, or nothing where another tells of it."""
        began_s = time.monotonic()
        self.drain()
        taken = take()
        self._outstanding = self._pool.submit(self._write, step, lambda: write(taken), time.monotonic() - began_s)

    def drain(self) -> None:
        """Waits until what was handed over is written, or has failed, which is told as an event."""
        if self._outstanding is not None:
            try:
                self._outstanding.result()
            except RaytrainError as error:
                self._tell("checkpoint_failed", error=str(error))
            self._outstanding = None

    def _write(self, step: int, write: Callable[[], str], held_s: float) -> None:
        started_s = time.monotonic()
        path = write()
        seconds = round(time.monotonic() - started_s, 3)
        if path:
            self._tell("checkpoint", step=step, path=path, seconds=seconds, held_s=round(held_s, 4))
