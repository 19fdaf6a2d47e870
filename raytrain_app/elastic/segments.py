"""A vector in segments, each of which is on its way to the other workers as soon as this one has its part of it.

Every worker sends each other worker one packet a segment: its nodes' partial sums for the slice of the segment which the
receiver owns. The receiver adds the nodes, and sends the mean of its slice to all. A short vector is one segment and goes whole
to all in one round: latency counts for it, not bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytrain_app.elastic.exchange import Exchange
from raytrain_app.elastic.plan import Node

SEGMENT_BYTES = 8 << 20
"""What segments take in the vector's dtype where there are several, at least, but for the last one."""
SLICE_BYTES = 1 << 20
"""What each worker's slice of such a segment takes at least: with many workers messages count as much as bytes."""
ROUND_BYTES = 1 << 20
"""A second round of the exchange costs as much as so many bytes more to receive or to sum: measured with gloo on loopback."""


@dataclass(frozen=True)
class Members:
    """Who exchanges what.

    Attributes:
        rank: of this worker in the group.
        covers: the nodes that each worker adds up, by rank.
        dtype: of the vector.
        wire_dtype: of the nodes' sums on the way.
        device: where the vector is.
        group: None is all workers.
    """

    rank: int
    covers: Sequence[Sequence[Node]]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def world_size(self) -> int:
        return len(self.covers)

    def two_rounds_cost_more(self, size: int) -> bool:
        """Whether each worker is to get and sum everything, instead of a slice which it then sends to all.

        Reckoned for the worker that receives most, so that all come to the same end, whatever each has of its own.
        """
        sums, mean = size * self.wire_dtype.itemsize, size * self.dtype.itemsize
        counts = [len(nodes) for nodes in self.covers]
        received, summed = (sum(counts) - min(counts)) * sums - mean, sum(counts) * sums
        return (received + summed) * (1 - 1 / self.world_size) <= ROUND_BYTES


class Segment:
    """A segment, its buffers, and its exchange.

    After `fit` each worker calls `expect_sums`, `send_sums`, `receive_sums`, `send_means` and `receive_means` for every segment,
    again and again, and all send in one order.

    Attributes:
        place: its elements in the vector.
        first: place in the vector of this worker's slice.
        mean: this worker's slice of the mean, to be written before `send_means`.
    """

    def __init__(self, members: Members, start: int, stop: int, gathered: torch.Tensor, *, whole: bool) -> None:
        self._members, self.place, self._whole = members, slice(start, stop), whole
        self._size = len(gathered) if whole else len(gathered) // members.world_size
        self.first = start if whole else start + members.rank * self._size
        slices = gathered.view(1 if whole else members.world_size, self._size).unbind()
        self.mean = slices[0 if whole else members.rank]
        means = None if whole else Exchange(members.rank, slices, [self.mean] * members.world_size, members.group)
        self._means = means
        self._packets: deque[_Packets] = deque()
        self._last: deque[_Packets] = deque()  # of the lengths before, whose packets may still be under way
        self._lengths: Sequence[int] | None = None

    def fit(self, lengths: Sequence[int]) -> None:
        """Makes buffers for heads of so many numbers, by rank, unless they are there."""
        if lengths != self._lengths:
            # A packet must stay until all have it. In two rounds, means tell that they do; in one, only the next packets.
            self._last, count = self._packets, 2 if self._whole else 1
            self._packets = deque(_Packets(self._members, self._size, lengths, same=self._whole) for _ in range(count))
            self._lengths = lengths

    @property
    def head(self) -> torch.Tensor:
        """Own numbers that go to each receiver with the sums, as bytes (receivers, 8 a number), to be written."""
        return self._packets[0].head

    @property
    def heads(self) -> list[torch.Tensor]:
        """The numbers of all workers, float64."""
        return self._packets[0].heads

    @property
    def sums(self) -> dict[Node, torch.Tensor]:
        """The slices of the sums of all workers' nodes."""
        return self._packets[0].sums

    def fill(self, number: int, values: torch.Tensor) -> None:
        """Lays in the sum of the worker's node with that number. What lies beyond its end is never looked at."""
        body = self._packets[0].bodies[number]
        if self._whole:
            body.copy_(values)
            return
        rows, rest = divmod(values.numel(), self._size)
        body[:rows].copy_(values[: rows * self._size].view(rows, self._size))
        if rest:
            body[rows, :rest].copy_(values[rows * self._size :])

    # Each of these raises PeerLost when a member is gone.

    def expect_sums(self) -> None:
        """Makes ready to receive heads and sums, in the order of `send_sums`; those of the time before may be overwritten."""
        self._packets.rotate()
        self._packets[0].exchange.expect()

    def send_sums(self) -> None:
        """Begins to send heads and sums."""
        self._packets[0].exchange.begin()

    def receive_sums(self) -> None:
        """Waits for heads and sums."""
        self._packets[0].exchange.wait()
        self._last.clear()

    def expect_means(self) -> None:
        """Makes ready to receive means, in the order of `send_means`; may be left out."""
        if self._means is not None:
            self._means.expect()

    def send_means(self) -> None:
        """Begins to send the mean of the own slice to all, where they do not have it."""
        if self._means is not None:
            self._means.begin()

    def receive_means(self) -> None:
        """Waits for the others' slices of the mean."""
        if self._means is not None:
            self._means.wait()


class _Packets:
    """Buffers for what a worker sends and receives in the first round, and their exchange.

    Attributes:
        head, heads, sums: see `Segment`.
        bodies: of the packets that are sent, those of each of the worker's nodes, (receivers, elements).
    """

    def __init__(self, members: Members, size: int, lengths: Sequence[int], *, same: bool) -> None:
        """`size` is that of a slice; `same` says that each receiver gets the same, else each gets its slice."""
        width, rank = members.wire_dtype.itemsize * size, members.rank
        # Heads are multiples of 8 bytes; bodies are padded to them, so that every view below is aligned.
        packets = [8 * n + -(-width * len(nodes) // 8) * 8 for n, nodes in zip(lengths, members.covers, strict=True)]
        sent = torch.empty(1 if same else members.world_size, packets[rank], dtype=torch.uint8, device=members.device)
        others = sent.new_empty(sum(packets) - packets[rank]).split([*packets[:rank], *packets[rank + 1 :]])
        parts = [*others[:rank], sent[0 if same else rank], *others[rank:]]  # its own stays where it is sent from
        self.exchange = Exchange(rank, parts, sent.expand(members.world_size, -1).unbind(), members.group)
        self.sums: dict[Node, torch.Tensor] = {}
        for part, length, nodes in zip(parts, lengths, members.covers, strict=True):
            for i, node in enumerate(nodes):
                self.sums[node] = part[8 * length + i * width : 8 * length + (i + 1) * width].view(members.wire_dtype)
        own = 8 * lengths[rank]
        self.bodies = [
            sent[:, own + i * width : own + (i + 1) * width].view(members.wire_dtype) for i in range(len(members.covers[rank]))
        ]
        self.head: torch.Tensor = sent[:, :own]
        self.heads = [part[: 8 * length].view(torch.float64) for part, length in zip(parts, lengths, strict=True)]


def count_segments(num_bytes: int, world_size: int) -> int:
    """In how many segments a vector of so many bytes goes that takes two rounds."""
    return max(1, num_bytes // max(SEGMENT_BYTES, SLICE_BYTES * world_size))


def cut(members: Members, size: int, num_early: int) -> tuple[list[Segment], torch.Tensor]:
    """A vector's segments, in the order in which they are sent, and where its mean will be, (size,).

    Args:
        members: who exchanges them.
        size: elements of the vector.
        num_early: leading elements that may be complete, from the last to the first, before the others are.
    """
    whole, unit = members.two_rounds_cost_more(size), 16 * members.world_size
    count = 1 if whole else count_segments(size * members.dtype.itemsize, members.world_size)
    length = size if whole else -(-size // (count * unit)) * unit
    # Slices are of one length, so the last ones may lie beyond the vector's end.
    means = torch.zeros(size if whole else -(-size // unit) * unit, dtype=members.dtype, device=members.device)
    segments = []
    for start in range(0, max(1, size), max(1, length)):
        segments.append(Segment(members, start, min(start + length, size), means[start : start + length], whole=whole))
    early = [segment for segment in segments if segment.place.stop <= num_early]
    return [*reversed(early), *segments[len(early) :]], means[:size]
