"""A worker as a server sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from raytrain_app.strategies.parameter_server.memory import Segment, Versions, bytes_of
from raytrain_app.strategies.parameter_server.wire import Peer


@dataclass(frozen=True)
class Pinned:
    """A version of the parameters that a worker reads, and that therefore stays as it is."""

    versions: Versions
    index: int
    version: int

    @property
    def vector(self) -> torch.Tensor:
        return self.versions.tensor(self.index)


@dataclass
class Session:
    """One connection of a worker. Its own thread reads and writes; the rest happens under the server's lock.

    Attributes:
        peer: the connection.
        worker: its id.
        pinned: the parameters that it was sent last; they stay until it is sent newer ones.
        has: shared buffers that it has mapped.
    """

    peer: Peer
    worker: str
    pinned: Pinned | None = None
    has: set[int] = field(default_factory=set)
    _slots: torch.Tensor | None = None
    _stride: int = 0
    _inbox: torch.Tensor | None = None

    @property
    def shares(self) -> bool:
        """Whether data goes through shared memory."""
        return self._slots is not None

    def map_slots(self, fd: int, stride: int, dtype: torch.dtype) -> None:
        """Takes the worker's shared memory, in which gradients lie `stride` elements apart."""
        self._slots, self._stride = Segment.open(fd).tensor(dtype), stride

    def read_vector(self, slot: int, start: int, stop: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """The range [start, stop) of the gradient that comes with a push, valid until the next request.

        Returns:
            The range, and how many bytes of the push's body it took.
        """
        if self._slots is not None:
            return self._slots[slot * self._stride + start : slot * self._stride + stop], 0
        if self._inbox is None:
            self._inbox = torch.empty(stop - start, dtype=dtype)
        self.peer.read_into(bytes_of(self._inbox))
        return self._inbox, self._inbox.numel() * self._inbox.itemsize

    def pin(self, versions: Versions, version: int) -> Pinned:
        """Pins the current version instead of the one before."""
        self.unpin()
        self.pinned = Pinned(versions, versions.pin(), version)
        return self.pinned

    def unpin(self) -> None:
        if self.pinned is not None:
            self.pinned.versions.unpin(self.pinned.index)
        self.pinned = None

    def base(self, version: int) -> torch.Tensor | None:
        """The parameters of a version, if they are those that it was sent last."""
        return self.pinned.vector if self.pinned is not None and self.pinned.version == version else None
