"""Memory that two processes of one machine share: parameters and gradients move at the speed of a copy, or without one."""

from __future__ import annotations

import mmap
import os
import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch


def can_share() -> bool:
    """Whether this system has anonymous files (Linux); elsewhere data goes over sockets."""
    return hasattr(os, "memfd_create")


class Segment:
    """A piece of memory behind an anonymous file, which is gone when the last process that has it is gone.

    The file has no name, so that nothing is left behind by a killed process, and is not bound by the size of /dev/shm.
    """

    def __init__(self, size_bytes: int) -> None:
        """Makes a new one, all zeros. Memory is taken when it is first written."""
        self.size_bytes = max(1, size_bytes)
        self.fd = os.memfd_create("raytrain", os.MFD_CLOEXEC) if can_share() else -1
        if self.fd >= 0:
            os.ftruncate(self.fd, self.size_bytes)
            self._map = mmap.mmap(self.fd, self.size_bytes)
        else:
            self._map = mmap.mmap(-1, self.size_bytes)

    @classmethod
    def open(cls, fd: int) -> Segment:
        """Maps another process's segment for reading; writing to it would end this process. Takes over `fd`."""
        segment = cls.__new__(cls)
        segment.size_bytes, segment.fd = os.fstat(fd).st_size, -1
        segment._map = mmap.mmap(fd, segment.size_bytes, prot=mmap.PROT_READ)
        os.close(fd)
        return segment

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The memory as one vector, which keeps it for as long as it lives itself."""
        array = np.frombuffer(self._map, numpy_dtype(dtype), self.size_bytes // dtype.itemsize)
        with warnings.catch_warnings():
            # torch warns that it cannot guard a read-only array; the mapping itself does.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)

    def close(self) -> None:
        """Gives back the file; the memory goes with the last tensor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Versions:
    """The parameters of one range: the current version, older ones that somebody still reads, and room for the next.

    A version is never changed once it is published, so a reader sees one whole version without a lock; its memory is used
    again when nobody has it pinned. All methods are called under the server's lock.
    """

    def __init__(self, first: torch.Tensor) -> None:
        self.segments: list[Segment] = []
        self._tensors: list[torch.Tensor] = []
        self._pins: Counter[int] = Counter()
        self._dtype, self._count = first.dtype, first.numel()
        self.index = self.spare()
        self._tensors[self.index].copy_(first)

    @property
    def current(self) -> torch.Tensor:
        """The newest version; only to be read."""
        return self._tensors[self.index]

    def tensor(self, index: int) -> torch.Tensor:
        """The version in buffer `index`, which must be pinned or current."""
        return self._tensors[index]

    def spare(self) -> int:
        """Index of a buffer that may be written."""
        for index in range(len(self._tensors)):
            if not self._pins[index] and index != self.index:
                return index
        self.segments.append(Segment(self._count * self._dtype.itemsize))
        self._tensors.append(self.segments[-1].tensor(self._dtype)[: self._count])
        return len(self._tensors) - 1

    def publish(self, index: int) -> None:
        """Makes the written buffer the current version."""
        self.index = index

    def pin(self) -> int:
        """Keeps the current version as it is until `unpin` of the returned index."""
        self._pins[self.index] += 1
        return self.index

    def unpin(self, index: int) -> None:
        self._pins[index] -= 1

    def close(self) -> None:
        for segment in self.segments:
            segment.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous vector on the host, as bytes."""
    view: Any = tensor.numpy()
    return memoryview(view).cast("B")


def numpy_dtype(dtype: torch.dtype) -> np.dtype[np.generic]:
    """The numpy dtype of a torch dtype."""
    return np.dtype(str(dtype).removeprefix("torch."))
