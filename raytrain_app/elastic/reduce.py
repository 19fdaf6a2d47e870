"""The exact reduction: float32 shard gradients, added in float64 along the fixed tree of `plan`, rounded once.

Every worker sends each other worker one packet: its control values, the scores of its nodes, and its nodes' partial sums
for the slice of the vector which the receiver owns. The receiver adds the nodes in tree order, divides, rounds to the
vector's dtype, and all slices are gathered. A float64 sum of float32 values is far inside a float32 rounding of the true
sum for any mix of magnitudes, and the tree's shape is fixed, so nothing has to be associative. While each worker owns one
shard its partial sum is the float32 gradient itself, and the exchange moves no more bytes than a float32 all-reduce.
Short vectors are gathered whole in one round: latency counts for them, not bytes.
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
GATHER_WHOLE_BYTES = 256 * 1024
"""Packets up to this size are gathered whole: measured break-even of one and two rounds over gloo on loopback."""


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
        mean: mean gradient, then mean float buffers, (layout.size,) in the layout's dtype.
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
    correct: int
    flags: list[int]
    rows: list[int] = field(default_factory=list)
    extra: list[float] = field(default_factory=list)


class Reducer:
    """Adds the shards of one generation's workers. Every rank makes the same calls in the same order."""

    def __init__(self, rank: int, world_size: int, num_shards: int, layout: Layout, num_flags: int, device: torch.device) -> None:
        self.rank, self.world_size, self.layout, self.device = rank, world_size, layout, device
        self.root: Node = (0, num_shards)
        self.covers = [cover(owned_shards(r, world_size, num_shards), self.root) for r in range(world_size)]
        self.num_flags = num_flags
        # Leaves travel as they are; a node above leaves holds a float64 sum that must not be rounded on the way.
        only_leaves = all(high - low == 1 for nodes in self.covers for low, high in nodes)
        self.wire_dtype = layout.dtype if only_leaves else torch.float64
        nodes = max(map(len, self.covers))
        self.whole = layout.size * nodes * self.wire_dtype.itemsize <= GATHER_WHOLE_BYTES
        self.slice_size = layout.size if self.whole else -(-layout.size // (16 * world_size)) * 16
        self.padded = self.slice_size if self.whole else self.slice_size * world_size
        self._sums = [torch.zeros(self.padded, dtype=torch.float64, device=device) for _ in self.covers[rank]]
        self._scratch: list[torch.Tensor] = []

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
        scores: list[torch.Tensor] = []
        for node, out in zip(self.covers[self.rank], self._sums, strict=True):
            scores.append(self._add_up(node, shard, out[: self.layout.size], counters, 0))
        if self.world_size == 1:
            mean = self._divide(self._sums[0], 0, num_rows, num_filled)
            return self._total(mean, counters.double(), scores[0], torch.tensor(flags), list(rows or ()))
        told = torch.tensor(rows or (), dtype=torch.float64, device=self.device)
        head = torch.cat([torch.tensor(flags, dtype=torch.float64, device=self.device), counters.double(), *scores, told])
        packets = self._exchange(head, self._row_counts(num_rows) if rows is not None else [0] * self.world_size)
        heads = [packet[0] for packet in packets]
        fixed = self.num_flags + self.layout.num_counters
        highest = torch.stack([h[:fixed] for h in heads]).amax(0)
        node_scores: dict[Node, torch.Tensor] = {}
        partial: dict[Node, torch.Tensor] = {}
        told_by_all: list[int] = []
        for nodes, (head, sums) in zip(self.covers, packets, strict=True):
            end = fixed + self.layout.num_scores * len(nodes)
            node_scores.update(zip(nodes, head[fixed:end].split(self.layout.num_scores), strict=True))
            partial.update(zip(nodes, sums, strict=True))
            told_by_all += [int(row) for row in head[end:].tolist()]
        first = 0 if self.whole else self.rank * self.slice_size
        mean = self._divide(_combine(partial, self.root), first, num_rows, num_filled)
        if not self.whole:
            gathered = torch.empty(self.padded, dtype=self.layout.dtype, device=self.device)
            with collective():
                dist.all_gather_single(gathered, mean)
            mean = gathered
        scores_of_all = _combine(node_scores, self.root)
        return self._total(mean, highest[self.num_flags :], scores_of_all, highest[: self.num_flags], told_by_all)

    def _row_counts(self, num_rows: int) -> list[int]:
        """Rows of each worker's shards in a batch."""
        num_shards = self.root[1]
        ends = [[training_rows(num_rows, num_shards, s) for s in (nodes[0][0], nodes[-1][1] - 1)] for nodes in self.covers]
        return [last.stop - first.start for first, last in ends]

    def _add_up(
        self, node: Node, shard: Callable[[int], Shard], out: torch.Tensor, counters: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Writes the float64 sum of `node` to `out`, raises `counters`, and returns the node's scores."""
        if node[1] - node[0] == 1:
            leaf = shard(node[0])
            out.copy_(leaf.vector)
            torch.maximum(counters, leaf.counters, out=counters)
            return leaf.scores.clone()
        left, right = children(node)
        scores = self._add_up(left, shard, out, counters, depth)
        if right[1] - right[0] == 1:
            leaf = shard(right[0])
            out.add_(leaf.vector)
            torch.maximum(counters, leaf.counters, out=counters)
            return scores.add_(leaf.scores)
        if depth == len(self._scratch):
            self._scratch.append(torch.empty(self.layout.size, dtype=torch.float64, device=self.device))
        scores.add_(self._add_up(right, shard, self._scratch[depth], counters, depth + 1))
        out.add_(self._scratch[depth])
        return scores

    def _exchange(self, head: torch.Tensor, row_counts: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Sends packets and returns from each rank its head and its nodes' sums (nodes, slice_size) for this rank's slice."""
        fixed = self.num_flags + self.layout.num_counters
        per_node = self.layout.num_scores
        head_bytes = [8 * (fixed + per_node * len(n) + rows) for n, rows in zip(self.covers, row_counts, strict=True)]
        body_bytes = [self.wire_dtype.itemsize * self.slice_size * len(nodes) for nodes in self.covers]
        # Heads are multiples of 8 bytes; bodies are padded to them, so that every view below is aligned.
        sizes = [h + -(-b // 8) * 8 for h, b in zip(head_bytes, body_bytes, strict=True)]
        copies = 1 if self.whole else self.world_size
        packet = torch.empty((copies, max(sizes) if self.whole else sizes[self.rank]), dtype=torch.uint8, device=self.device)
        packet[:, : head_bytes[self.rank]] = head.view(torch.uint8)
        for i, node_sum in enumerate(self._sums):
            start = head_bytes[self.rank] + i * self.wire_dtype.itemsize * self.slice_size
            stop = start + self.wire_dtype.itemsize * self.slice_size
            packet[:, start:stop] = node_sum.to(self.wire_dtype).view(copies, self.slice_size).view(torch.uint8)
        if self.whole:
            flat = torch.empty(self.world_size * max(sizes), dtype=torch.uint8, device=self.device)
            with collective():
                dist.all_gather_single(flat, packet.view(-1))
            received = list(flat.split(max(sizes)))
        else:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            with collective():
                dist.all_to_all_single(flat, packet.view(-1), sizes, [sizes[self.rank]] * self.world_size)
            received = list(flat.split(sizes))
        return [
            (data[:h].view(torch.float64), data[h : h + b].view(self.wire_dtype).view(len(nodes), self.slice_size))
            for data, h, b, nodes in zip(received, head_bytes, body_bytes, self.covers, strict=True)
        ]

    def _divide(self, total: torch.Tensor, first: int, num_rows: int, num_filled: int) -> torch.Tensor:
        """Turns float64 sums of the elements from `first` on into means, rounded once to the layout's dtype."""
        split = min(max(self.layout.num_parameters - first, 0), total.numel())
        total[:split].div_(num_rows)
        total[split:].div_(num_filled)
        return total.to(self.layout.dtype)

    def _total(
        self, mean: torch.Tensor, counters: torch.Tensor, scores: torch.Tensor, flags: torch.Tensor, rows: list[int]
    ) -> Total:
        loss, correct, *extra = scores.tolist()
        flag_values = [int(flag) for flag in flags.tolist()]
        return Total(mean[: self.layout.size], counters.to(torch.int64), loss, round(correct), flag_values, rows, extra)


def _combine(parts: dict[Node, torch.Tensor], node: Node) -> torch.Tensor:
    """The float64 sum of `node` from the sums of the nodes below it, in tree order; consumes `parts`."""
    if node in parts:
        return parts[node].to(torch.float64)
    left, right = children(node)
    total = _combine(parts, left)
    return total.add_(parts[right] if right in parts else _combine(parts, right))
