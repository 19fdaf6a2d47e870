"""The exact reduction: float32 shard gradients, added in float64 along the fixed tree of `plan`, rounded once.

Every worker sends each other worker one packet: its control values, the scores of its nodes, and its nodes' partial sums
for the slice of the vector which the receiver owns. The receiver adds the nodes in tree order, divides, rounds to the
vector's dtype, and sends its slice to all. A float64 sum of float32 values is far inside a float32 rounding of the true
sum for any mix of magnitudes, and the tree's shape is fixed, so nothing has to be associative. While each worker owns one
shard its partial sum is the float32 gradient itself, and the exchange moves no more bytes than a float32 all-reduce.
Short vectors go whole to all in one round: latency counts for them, not bytes. Both rounds are all-to-all exchanges, which
gloo does without a copy, in two thirds of the time of its all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from raytrain_app.elastic.group import collective
from raytrain_app.elastic.plan import Node, children, cover, owned_shards, training_rows

NUM_SCORES = 2
"""Scores that every task has: sum of the losses and number of rows predicted correctly."""
ROUND_BYTES = 1 << 20
"""A second round of the exchange costs as much as so many bytes more to receive or to sum: measured with gloo on loopback."""
BLOCK = 1 << 16
"""Elements that are added up at a time on a CPU: their float64 sums, 512 KiB, stay in a core's cache."""


@dataclass(frozen=True)
class Layout:
    """Sections of a learner's flat vector and of what travels beside it.

    Attributes:
        num_parameters: leading elements, averaged over the rows of the batch.
        num_buffers: following elements (float buffers), averaged over the shards that had rows.
        num_counters: integer buffers, reduced by their maximum.
        dtype: dtype of the flat vector, float32 or float64.
        num_scores: sum of the losses, rows predicted correctly, and whatever more a task's own metrics add up.
    """

    num_parameters: int = 0
    num_buffers: int = 0
    num_counters: int = 0
    dtype: torch.dtype = torch.float32
    num_scores: int = NUM_SCORES

    @property
    def size(self) -> int:
        return self.num_parameters + self.num_buffers


@dataclass
class Shard:
    """What one shard contributes. `vector` may be reused by the learner for the next shard.

    Attributes:
        vector: summed gradient and float buffers, (layout.size,).
        counters: integer buffers, int64 (layout.num_counters,).
        scores: float64 (layout.num_scores,): sum of the losses, rows predicted correctly, and more.
    """

    vector: torch.Tensor
    counters: torch.Tensor
    scores: torch.Tensor


@dataclass
class Total:
    """The reduced batch, the same bits on every worker.

    Attributes:
        mean: mean gradient, then mean float buffers, (layout.size,) in the layout's dtype; valid until the next batch.
        counters: largest integer buffers, int64 (layout.num_counters,).
        loss: sum of the losses.
        correct: rows predicted correctly.
        flags: largest value of each control flag.
        rows: with audit, the ids of the rows that each worker really used, in rank order; else empty.
        extra: sums of the scores beyond those two.
    """

    mean: torch.Tensor
    counters: torch.Tensor
    loss: float
    correct: float
    flags: list[int]
    rows: list[int] = field(default_factory=list)
    extra: list[float] = field(default_factory=list)


class Reducer:
    """Adds the shards of one generation's workers. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        num_shards: int,
        layout: Layout,
        num_flags: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`rank` and `world_size` are those of `group`, by default of all."""
        self.rank, self.world_size, self.layout, self.device, self._group = rank, world_size, layout, device, group
        self.root: Node = (0, num_shards)
        self.covers = [cover(owned_shards(r, world_size, num_shards), self.root) for r in range(world_size)]
        self.num_flags = num_flags
        # Leaves travel as they are; a node above leaves holds a float64 sum that must not be rounded on the way.
        only_leaves = all(_is_leaf(node) for nodes in self.covers for node in nodes)
        self.wire_dtype = layout.dtype if only_leaves else torch.float64
        self.whole = world_size == 1 or self._two_rounds_cost_more()
        self.slice_size = layout.size if self.whole else -(-layout.size // (16 * world_size)) * 16
        self._mean = torch.zeros(self.slice_size, dtype=layout.dtype, device=device)
        # All slices together; the last ones may lie beyond the vector's end.
        self._gathered = self._mean if self.whole else self._mean.new_empty(world_size * self.slice_size)
        self._copies = self._mean if self.whole else self._mean.new_empty(world_size, self.slice_size)
        self._block = BLOCK if device.type == "cpu" else max(1, self.slice_size)
        self._scratch: list[torch.Tensor] = []
        self._packets: _Packets | None = None

    def reduce(
        self,
        shard: Callable[[int], Shard],
        num_rows: int,
        num_filled: int,
        flags: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> Total:
        """Computes this worker's shards and returns the batch's total.

        Args:
            shard: computes the shard with the given number; called once for each owned shard, in order.
            num_rows: rows of the global batch.
            num_filled: shards that have rows.
            flags: this worker's control flags, small non-negative integers.
            rows: ids of the rows behind this worker's shards, to be told to all; all workers pass them or none does.

        Raises:
            PeerLost: a member is gone; nothing of this batch is known to the caller.
        """
        counters = torch.zeros(self.layout.num_counters, dtype=torch.int64, device=self.device)
        if self.world_size == 1:
            vector, scores = self._add_up(self.root, shard, counters)
            self._average({self.root: vector}, 0, num_rows, num_filled)
            return self._total(counters, scores, torch.tensor(flags), list(rows or ()))
        packets = self._packets_for(self._row_counts(num_rows) if rows is not None else (0,) * self.world_size)
        own_scores = []
        for node, body in zip(self.covers[self.rank], packets.bodies, strict=True):
            vector, scores = self._add_up(node, shard, counters)
            own_scores.append(scores)
            self._fill(body, vector)
        told = torch.tensor(rows or (), dtype=torch.float64, device=self.device)
        head = torch.cat([torch.tensor(flags, dtype=torch.float64, device=self.device), counters.double(), *own_scores, told])
        packets.head[:] = head.view(torch.uint8)
        self.exchange(packets.received, packets.sent, packets.sizes)
        fixed = self.num_flags + self.layout.num_counters
        highest = torch.stack([head[:fixed] for head in packets.heads]).amax(0)
        scores_of: dict[Node, torch.Tensor] = {}
        told_by_all: list[int] = []
        for nodes, head in zip(self.covers, packets.heads, strict=True):
            end = fixed + self.layout.num_scores * len(nodes)
            scores_of.update(zip(nodes, head[fixed:end].split(self.layout.num_scores), strict=True))
            told_by_all += map(int, head[end:].tolist())
        self._average(packets.sums, 0 if self.whole else self.rank * self.slice_size, num_rows, num_filled)
        if not self.whole:
            self._copies[:] = self._mean
            self.exchange(self._gathered, self._copies, [self.slice_size] * self.world_size)
        scores = _combine(scores_of, self.root)
        return self._total(highest[self.num_flags :], scores, highest[: self.num_flags], told_by_all)

    def _row_counts(self, num_rows: int) -> tuple[int, ...]:
        """Rows of each worker's shards in a batch."""
        num_shards = self.root[1]
        ends = [[training_rows(num_rows, num_shards, s) for s in (nodes[0][0], nodes[-1][1] - 1)] for nodes in self.covers]
        return tuple(last.stop - first.start for first, last in ends)

    def _add_up(
        self, node: Node, shard: Callable[[int], Shard], counters: torch.Tensor, depth: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of `node` and its scores; raises `counters`.

        The sum is a leaf's own vector, which the next shard may overwrite, or float64 and this node's.
        """
        if _is_leaf(node):
            leaf = shard(node[0])
            torch.maximum(counters, leaf.counters, out=counters)
            return leaf.vector, leaf.scores
        left, right = children(node)
        vector, scores = self._add_up(left, shard, counters, depth)
        if _is_leaf(left):
            total = self._sum_at(depth)
            total.copy_(vector)
        else:
            total = vector
        more, more_scores = self._add_up(right, shard, counters, depth + 1)
        return total.add_(more), scores + more_scores

    def _average(self, parts: dict[Node, torch.Tensor], first: int, num_rows: int, num_filled: int) -> None:
        """Writes this worker's slice of the means, elements from `first` on: sums in tree order, rounded once at the end.

        It goes block by block, since a processor's cache holds the float64 values of a block and not those of a vector.
        """
        end = min(self.slice_size, self.layout.size - first)
        for start in range(0, end, self._block):
            stop = min(start + self._block, end)
            out = self._mean[start:stop]
            total = _combine({node: part[start:stop] for node, part in parts.items()}, self.root)
            split = min(max(self.layout.num_parameters - first - start, 0), stop - start)
            _divide(total[:split], num_rows, out[:split])
            _divide(total[split:], num_filled, out[split:])

    def _packets_for(self, row_counts: tuple[int, ...]) -> _Packets:
        """Buffers for heads that tell of so many rows each; those of the last call, unless the numbers have changed."""
        if self._packets is None or self._packets.row_counts != row_counts:
            self._packets = None  # its memory is free before the next is taken
            self._packets = self._new_packets(row_counts)
        return self._packets

    def _new_packets(self, row_counts: tuple[int, ...]) -> _Packets:
        fixed = self.num_flags + self.layout.num_counters
        width, per_node = self.wire_dtype.itemsize * self.slice_size, self.layout.num_scores
        head_bytes = [8 * (fixed + per_node * len(n) + rows) for n, rows in zip(self.covers, row_counts, strict=True)]
        # Heads are multiples of 8 bytes; bodies are padded to them, so that every view below is aligned.
        sizes = [head + -(-width * len(nodes) // 8) * 8 for head, nodes in zip(head_bytes, self.covers, strict=True)]
        sent = torch.empty((self.world_size, sizes[self.rank]), dtype=torch.uint8, device=self.device)
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        sums: dict[Node, torch.Tensor] = {}
        for data, start, nodes in zip(received.split(sizes), head_bytes, self.covers, strict=True):
            for i, node in enumerate(nodes):
                sums[node] = data[start + i * width : start + (i + 1) * width].view(self.wire_dtype)
        own = head_bytes[self.rank]
        return _Packets(
            row_counts=row_counts,
            sizes=sizes,
            sent=sent,
            head=sent[:, :own],
            bodies=[
                sent[:, own + i * width : own + (i + 1) * width].view(self.wire_dtype) for i in range(len(self.covers[self.rank]))
            ],
            received=received,
            heads=[data[:h].view(torch.float64) for data, h in zip(received.split(sizes), head_bytes, strict=True)],
            sums=sums,
        )

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, sizes: list[int]) -> None:
        """Sends each row of `sent` to one worker, and receives from all, `sizes` elements each."""
        with collective():
            dist.all_to_all_single(received, sent.view(-1), sizes, [sizes[self.rank]] * self.world_size, group=self._group)

    def _two_rounds_cost_more(self) -> bool:
        """Whether each worker is to get and sum everything, instead of a slice which it then sends to all."""
        sums, mean = self.layout.size * self.wire_dtype.itemsize, self.layout.size * self.layout.dtype.itemsize
        nodes = sum(map(len, self.covers))
        received, summed = (nodes - len(self.covers[self.rank])) * sums - mean, nodes * sums
        return (received + summed) * (1 - 1 / self.world_size) <= ROUND_BYTES

    def _fill(self, body: torch.Tensor, vector: torch.Tensor) -> None:
        """Lays a vector, or a slice each, into the rows of `body`. What lies beyond its end is never looked at."""
        if self.whole:
            body.copy_(vector)  # the same to each
            return
        rows, rest = divmod(vector.numel(), self.slice_size)
        body[:rows].copy_(vector[: rows * self.slice_size].view(rows, self.slice_size))
        if rest:
            body[rows, :rest].copy_(vector[rows * self.slice_size :])

    def _sum_at(self, depth: int) -> torch.Tensor:
        """A float64 vector to add up in; one a level of the tree is enough."""
        if depth == len(self._scratch):
            self._scratch.append(torch.empty(self.layout.size, dtype=torch.float64, device=self.device))
        return self._scratch[depth]

    def _total(self, counters: torch.Tensor, scores: torch.Tensor, flags: torch.Tensor, rows: list[int]) -> Total:
        loss, correct, *extra = scores.tolist()
        mean = self._gathered[: self.layout.size]
        return Total(mean, counters.to(torch.int64), loss, correct, list(map(int, flags.tolist())), rows, extra)


@dataclass
class _Packets:
    """The buffers of an exchange, and where things are in them.

    Attributes:
        row_counts: rows of which each worker tells.
        sizes: bytes of each worker's packet.
        sent: uint8, a packet for each receiver.
        head: own head's bytes in each of them.
        bodies: places of own nodes' sums in each of them, (world_size, slice_size) in the wire dtype.
        received: uint8, the packets of all.
        heads: of all, float64.
        sums: slices of the sums of all workers' nodes, (slice_size,) in the wire dtype.
    """

    row_counts: tuple[int, ...]
    sizes: list[int]
    sent: torch.Tensor
    head: torch.Tensor
    bodies: list[torch.Tensor]
    received: torch.Tensor
    heads: list[torch.Tensor]
    sums: dict[Node, torch.Tensor]


def _is_leaf(node: Node) -> bool:
    return node[1] - node[0] == 1


def _combine(parts: dict[Node, torch.Tensor], node: Node) -> torch.Tensor:
    """The sum of `node` from those of the nodes below it, in tree order: in float64, unless it is a part itself."""
    if node in parts:
        return parts[node]
    left, right = children(node)
    total = _combine(parts, left)
    if left in parts:
        total = total.to(torch.float64, copy=True)
    return total.add_(_combine(parts, right))


def _divide(total: torch.Tensor, count: int, out: torch.Tensor) -> None:
    """Writes total / count to `out`, rounded to its dtype.

    A single leaf is float32 and is divided as it is: a float64 quotient rounded to float32 is the same number, since 53 bits
    are more than twice 24 and two (Figueroa, When is double rounding innocuous?, 1995). Powers of two are multiplied with, which
    is as exact as the division and several times as fast.
    """
    if count & (count - 1) == 0:
        torch.mul(total, 1 / count, out=out)
    else:
        torch.div(total, count, out=out)
