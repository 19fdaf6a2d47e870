"""A vector in segments, each of which is on its way to the other workers as soon as this one has its part of it.

Every worker sends each other worker one packet a segment: its nodes' partial sums for the slice of the segment which the
receiver owns. The receiver adds the nodes, and sends the mean of its slice to all. A short vector is one segment and goes whole
to all in one round: latency counts for it, not bytes. Both rounds are all-to-all exchanges, which gloo does without a copy, in
two thirds of the time of its all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytrain_app.elastic.group import collective
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

    After `fit` each worker calls `send`, `receive`, `share` and `receive` for every segment, and all do so in one order.

    Attributes:
        place: its elements in the vector.
        first: place in the vector of this worker's slice.
        mean: this worker's slice of the mean, to be written before `share`.
        gathered: the mean of the whole segment, and elements without a meaning behind it.
        head, heads: own numbers, float64, that go to each receiver with the sums, and those of all workers.
        sums: the slices of the sums of all workers' nodes.
    """

    def __init__(self, members: Members, start: int, stop: int, gathered: torch.Tensor, *, whole: bool) -> None:
        self._members, self.place, self._whole = members, slice(start, stop), whole
        self._size = len(gathered) if whole else len(gathered) // members.world_size
        self.first = start if whole else start + members.rank * self._size
        self._copies = gathered.view(1, -1) if whole else gathered.new_zeros(members.world_size, self._size)
        self.mean, self.gathered = self._copies[0], gathered
        self._work: dist.Work | None = None
        self._lengths: Sequence[int] | None = None

    def fit(self, lengths: Sequence[int]) -> None:
        """Makes buffers for heads of so many numbers, by rank, unless they are there."""
        if lengths == self._lengths:
            return
        self._lengths, members = lengths, self._members
        # The memory of the last buffers is free before the next is taken.
        self._sent = self._received = self.head = torch.empty(0)
        self._bodies: list[torch.Tensor] = []
        self.heads: list[torch.Tensor] = []
        self.sums: dict[Node, torch.Tensor] = {}
        width, rank = members.wire_dtype.itemsize * self._size, members.rank
        # Heads are multiples of 8 bytes; bodies are padded to them, so that every view below is aligned.
        packets = [8 * n + -(-width * len(nodes) // 8) * 8 for n, nodes in zip(lengths, members.covers, strict=True)]
        self._packets = packets
        self._sent = torch.empty((members.world_size, packets[rank]), dtype=torch.uint8, device=members.device)
        self._received = torch.empty(sum(packets), dtype=torch.uint8, device=members.device)
        parts = self._received.split(packets)
        for part, length, nodes in zip(parts, lengths, members.covers, strict=True):
            for i, node in enumerate(nodes):
                self.sums[node] = part[8 * length + i * width : 8 * length + (i + 1) * width].view(members.wire_dtype)
        own = 8 * lengths[rank]
        self._bodies = [
            self._sent[:, own + i * width : own + (i + 1) * width].view(members.wire_dtype)
            for i in range(len(members.covers[rank]))
        ]
        self.head = self._sent[:, :own]
        self.heads = [part[: 8 * length].view(torch.float64) for part, length in zip(parts, lengths, strict=True)]

    def fill(self, number: int, values: torch.Tensor) -> None:
        """Lays in the sum of the worker's node with that number. What lies beyond its end is never looked at."""
        body = self._bodies[number]
        if self._whole:
            body.copy_(values)  # the same to each
            return
        rows, rest = divmod(values.numel(), self._size)
        body[:rows].copy_(values[: rows * self._size].view(rows, self._size))
        if rest:
            body[rows, :rest].copy_(values[rows * self._size :])

    def send(self) -> None:
        """Begins the exchange of heads and sums."""
        self._exchange(self._received, self._sent.view(-1), self._packets)

    def share(self) -> None:
        """Begins to send the mean of the own slice to all, where they do not have it."""
        if not self._whole:
            self._copies[1:] = self.mean
            self._exchange(self.gathered, self._copies.view(-1), [self._size] * self._members.world_size)

    def receive(self) -> None:
        """Waits for what was begun, if anything.

        Raises:
            PeerLost: a member is gone.
        """
        work, self._work = self._work, None
        if work is not None:
            with collective():
                work.wait()

    def _exchange(self, received: torch.Tensor, sent: torch.Tensor, sizes: list[int]) -> None:
        members = self._members
        with collective():
            self._work = dist.all_to_all_single(
                received, sent, sizes, [sizes[members.rank]] * members.world_size, group=members.group, async_op=True
            )


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
