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

SHARE = 0.01
"""Part of the training time that snapshots may cost."""
SHORTEST_S = 1.0


class Vault:
    """The actor that holds the snapshot, on the driver's node: workers' nodes come and go."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, np.ndarray]] = {}
        self._newest: int | None = None

    def put(self, clock: int, data: np.ndarray, place: int = 0, peers: int = 1) -> None:
        """Keeps a copy of a replica's snapshot, or of part `place` of `peers`, if it is newer than the newest whole one."""
        if self._newest is not None and clock <= self._newest:
            return
        parts = self._parts.setdefault(clock, {})
        parts[place] = data.copy()  # the argument is a view of the sender's object
        if len(parts) == peers:
            self._newest = clock
            self._parts = {other: kept for other, kept in self._parts.items() if other >= clock}

    def newest(self) -> int | None:
        """Clock of the newest snapshot that is whole."""
        return self._newest

    def get(self, clock: int, place: int = 0) -> np.ndarray | None:
        """What was put, unless something newer has taken its place."""
        return self._parts.get(clock, {}).get(place)


class VaultKeeper:
    """The leader's end: decides when a snapshot is worth its cost, and sends it from a thread.

    Args:
        vault: where snapshots go.
        place, peers: which part of a replica's snapshot comes from here, and of how many.
    """

    def __init__(self, vault: Actor, place: int = 0, peers: int = 1) -> None:
        self._vault, self._place, self._peers = vault, place, peers
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="vault")
        self._sending: Future[float] | None = None
        self._cost_s = 0.0
        self._last_s = time.monotonic()

    def due(self) -> bool:
        """Whether enough time has passed since the last snapshot.

        The pause between two grows with what one costs, so that they take at most `SHARE` of the time.
        """
        if self._sending is not None and self._sending.done():
            self._cost_s = self._sending.result()
        waited = time.monotonic() - self._last_s >= max(SHORTEST_S, self._cost_s / SHARE)
        return waited and (self._sending is None or self._sending.done())

    def send(self, snapshot: Callable[[], TrainState]) -> None:
        """Takes a snapshot and sends it from the thread, after the one before."""
        now_s = time.monotonic()
        state = snapshot()
        self._last_s = time.monotonic()
        self._sending = self._pool.submit(self._send, state, self._last_s - now_s)

    def put(self, state: TrainState) -> None:
        """Sends a snapshot now and waits until it is safe."""
        if self._sending is not None:
            self._sending.result()
        self._send(state, 0.0)

    def newest(self) -> int | None:
        """Clock of the snapshot to go on from, if the vault has one."""
        clock: int | None = wait_for(self._vault.newest.remote())
        return clock

    def get(self, clock: int) -> TrainState | None:
        """This worker's part of a snapshot; None if it is no longer there."""
        found: np.ndarray | None = wait_for(self._vault.get.remote(clock, self._place))
        return TrainState.from_bytes(found.tobytes()) if found is not None else None

    def _send(self, state: TrainState, held_s: float) -> float:
        """Returns what the snapshot cost in all, in seconds."""
        started_s, clock = time.monotonic(), state.progress["step"] + state.progress["epoch"]
        with suppress(RayError):  # the vault is being restarted; the next snapshot comes soon
            wait_for(self._vault.put.remote(clock, np.frombuffer(state.to_bytes(), np.uint8), self._place, self._peers))
        return held_s + time.monotonic() - started_s
