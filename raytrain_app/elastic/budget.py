"""How many crashes a run bears: lost machines do not count, and a crash that comes back at the same step is the task's."""

from __future__ import annotations

from dataclasses import dataclass

SAME_STEP_LIMIT = 4
"""Crashes in a row without a step between them after which the task is to blame."""


@dataclass
class FailureBudget:
    """Counts crashes of worker processes on machines that live on; those of one generation are one, however many died.

    Attributes:
        max_restarts: crashes to bear.
        used: crashes so far.
    """

    max_restarts: int
    used: int = 0
    _generation: int = 0
    _clock: int = -1
    _in_a_row: int = 0

    def crash(self, clock: int, generation: int) -> str | None:
        """A worker process died.

        Args:
            clock: how far the run is known to be.
            generation: number of the generation that the worker was in, or would have joined; 0 before the first.

        Returns:
            Why the run has to end, or None.
        """
        if generation and generation == self._generation:
            return None
        self.used, self._generation = self.used + 1, generation
        self._in_a_row = self._in_a_row + 1 if clock == self._clock else 1
        self._clock = clock
        if self._in_a_row >= SAME_STEP_LIMIT:
            return (
                f"worker processes died {self._in_a_row} times without a step between; the task or its libraries crash there. "
                "Look at the workers' logs in Ray's session folder, and at their memory"
            )
        if self.used > self.max_restarts:
            return (
                f"worker processes crashed {self.used} times, and failure.max_restarts is {self.max_restarts} "
                "(lost machines do not count); raise it, or find out why they crash"
            )
        return None
