"""A long vector's elements, piece by piece, on several threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

ALIGNMENT = 64
"""Elements to which pieces are rounded, so that a kernel rounds each element as it would in one piece."""
LONG = 1 << 20
"""Elements from which threads pay: below, waking them takes as long as the work."""


class Pieces:
    """Threads that share the pieces of one vector at a time.

    Args:
        threads: that work, the caller's among them.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._helpers = ThreadPoolExecutor(threads - 1, "pieces") if threads > 1 else None

    def each(self, size: int, length: int, work: Callable[[slice], None]) -> None:
        """Does something with all elements, once each, and returns when it is done.

        Args:
            size: elements.
            length: elements of a piece, a multiple of `ALIGNMENT`; those at the end of a thread's share may be shorter.
            work: called with each piece, by several threads at once. Torch lets go of the interpreter while it computes.
        """
        if self._helpers is None or size < LONG:
            _share(0, size, length, work)
            return
        share = -(-size // (self._threads * ALIGNMENT)) * ALIGNMENT
        others = [
            self._helpers.submit(_share, start, min(start + share, size), length, work) for start in range(share, size, share)
        ]
        _share(0, share, length, work)
        for other in others:
            other.result()


def _share(start: int, stop: int, length: int, work: Callable[[slice], None]) -> None:
    for first in range(start, stop, length):
        work(slice(first, min(first + length, stop)))
