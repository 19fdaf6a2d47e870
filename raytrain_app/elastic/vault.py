"""The newest snapshot of a run in another process's memory, for when all workers are lost at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from ray.exceptions import RayError

from raytrain_app.actors import Actor, wait_for
from raytrain_app.state import TrainState

Snapshot = tuple[int, np.ndarray]
"""Clock and the bytes of a `TrainState`, uint8."""
SHARE = 0.02
"""Part of the training time that snapshots may cost."""
SHORTEST_S = 0.5


class Vault:
    """The actor that holds the snapshot, on the driver's node: workers' nodes come and go."""

    def __init__(self) -> None:
        self._newest: Snapshot | None = None

    def put(self, clock: int, data: np.ndarray) -> None:
        """Keeps a copy of the snapshot if it is the newest."""
        if self._newest is None or clock > self._newest[0]:
            self._newest = clock, data.copy()  # the argument is a view of the sender's object

    def get(self) -> Snapshot | None:
        """The newest snapshot."""
        return self._newest


class VaultKeeper:
    """The leader's end: decides when a snapshot is worth its cost, and sends it from a thread."""

    def __init__(self, vault: Actor) -> None:
        self._vault = vault
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="vault")
        self._sending: Future[float] | None = None
        self._cost_s = 0.0
        self._last_s = time.monotonic()

    def offer(self, snapshot: Callable[[], TrainState]) -> None:
        """Called after each step; takes and sends a snapshot when enough time has passed since the last one.

        The pause between two grows with what one costs, so that they take at most `SHARE` of the time.
        """
        now_s = time.monotonic()
        if now_s - self._last_s < max(SHORTEST_S, self._cost_s / SHARE) or (self._sending and not self._sending.done()):
            return
        if self._sending is not None:
            self._cost_s = self._sending.result()
        state = snapshot()
        self._last_s = time.monotonic()
        self._sending = self._pool.submit(self._send, state, self._last_s - now_s)

    def put(self, state: TrainState) -> None:
        """Sends a snapshot now and waits until it is safe."""
        if self._sending is not None:
            self._sending.result()
        self._send(state, 0.0)

    def newest(self) -> TrainState | None:
        """The snapshot to go on from, if the vault has one."""
        found: Snapshot | None = wait_for(self._vault.get.remote())
        return TrainState.from_bytes(found[1].tobytes()) if found is not None else None

    def _send(self, state: TrainState, held_s: float) -> float:
        """Returns what the snapshot cost in all, in seconds."""
        started_s = time.monotonic()
        with suppress(RayError):  # the vault is being restarted; the next snapshot comes soon
            wait_for(
                self._vault.put.remote(
                    state.progress["step"] + state.progress["epoch"], np.frombuffer(state.to_bytes(), np.uint8)
                )
            )
        return held_s + time.monotonic() - started_s
