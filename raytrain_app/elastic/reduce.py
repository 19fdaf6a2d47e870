"""The exact reduction: float32 shard gradients, added in float64 along the fixed tree of `plan`, rounded once.

Every worker tells each other one its control values, the scores of its nodes, and its nodes' partial sums (`segments`). They are
added in tree order, divided, and rounded to the vector's dtype. A float64 sum of float32 values is far inside a float32 rounding
of the true sum for any mix of magnitudes, and the tree's shape is fixed, so nothing has to be associative. While each worker
owns one shard its partial sum is the float32 gradient itself, and the exchange moves no more bytes than a float32 all-reduce. A
long vector is sent while backward of the worker's last shard still computes its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from raytrain_app.elastic.plan import Node, children, cover, owned_shards, training_rows
from raytrain_app.elastic.segments import Members, cut

NUM_SCORES = 2
"""Scores that every task has: sum of the losses and number of rows predicted correctly."""
BLOCK = 1 << 16
"""Elements that are added up at a time on a CPU: their float64 sums, 512 KiB, stay in a core's cache."""


Ready = Callable[[torch.Tensor, int], None]
"""Is told of a vector, and from which of its elements on all gradients are complete; may be called again with smaller ones."""


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


ComputeShard = Callable[[int, Ready | None], Shard]
"""Computes the shard with a number, and may tell of its vector on the way."""


@dataclass
class Total:
    """The reduced batch, the same bits on every worker.

    Attributes:
        mean: mean gradient, then mean float buffers, (layout.size,) in the layout's dtype; valid until the next batch, and only
            to be read, since this worker's slice may still be on its way to the others.
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
    """Adds the shards of one generation's workers. Every rank makes the same calls in the same order.

    Attributes:
        segments: of the vector, in the order in which they are sent; none for a single worker.
    """

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
        self.rank, self.world_size, self.layout, self.device = rank, world_size, layout, device
        self.root: Node = (0, num_shards)
        self.covers = [cover(owned_shards(r, world_size, num_shards), self.root) for r in range(world_size)]
        self.num_flags = num_flags
        self._fixed = num_flags + layout.num_counters
        # Leaves travel as they are; a node above leaves holds a float64 sum that must not be rounded on the way.
        only_leaves = all(_is_leaf(node) for nodes in self.covers for node in nodes)
        members = Members(rank, self.covers, layout.dtype, layout.dtype if only_leaves else torch.float64, device, group)
        if world_size > 1:
            self.segments, self._mean = cut(members, layout.size, layout.num_parameters)
            for segment in self.segments[:-1]:  # the last one carries the heads, which may change their lengths
                segment.fit([0] * world_size)
        else:
            self.segments, self._mean = [], torch.zeros(layout.size, dtype=layout.dtype, device=device)
        self._block = BLOCK if device.type == "cpu" else max(1, layout.size)
        self._scratch: list[torch.Tensor] = []

    def reduce(
        self,
        shard: ComputeShard,
        num_rows: int,
        num_filled: int,
        flags: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> Total:
        """Computes this worker's shards and returns the batch's total.

        Args:
            shard: called once for each owned shard, in order.
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
            self._average({self.root: vector}, 0, self._mean, num_rows, num_filled)
            return self._total(counters, scores, torch.tensor(flags), list(rows or ()))
        told = self._row_counts(num_rows) if rows is not None else [0] * self.world_size
        last = self.segments[-1]
        last.fit([self._fixed + self.layout.num_scores * len(n) + count for n, count in zip(self.covers, told, strict=True)])
        for segment in self.segments:
            segment.expect_sums()
        for segment in self.segments:
            segment.expect_means()
        own_scores = self._send(shard, counters)
        first, end = (torch.tensor(n, dtype=torch.float64, device=self.device) for n in (flags, rows or ()))
        last.head[:] = torch.cat([first, counters.double(), *own_scores, end]).view(torch.uint8)
        last.send_sums()
        self._receive(num_rows, num_filled)
        highest = torch.stack([head[: self._fixed] for head in last.heads]).amax(0)
        scores_of: dict[Node, torch.Tensor] = {}
        told_by_all: list[int] = []
        for nodes, head in zip(self.covers, last.heads, strict=True):
            rest = self._fixed + self.layout.num_scores * len(nodes)
            scores_of.update(zip(nodes, head[self._fixed : rest].split(self.layout.num_scores), strict=True))
            told_by_all += map(int, head[rest:].tolist())
        scores = _combine(scores_of, self.root)
        return self._total(highest[self.num_flags :], scores, highest[: self.num_flags], told_by_all)

    def _send(self, shard: ComputeShard, counters: torch.Tensor) -> list[torch.Tensor]:
        """Sends all segments but the last one, which only lacks its head then; returns the scores of the worker's nodes."""
        segments, scores = self.segments, []
        *nodes, last = enumerate(self.covers[self.rank])
        for number, node in nodes:
            vector, own = self._add_up(node, shard, counters)
            scores.append(own)
            for segment in segments:
                segment.fill(number, vector[segment.place])
        number, waiting = last[0], segments[:-1]
        branch = self._branch(last[1], shard, counters)

        def send(vector: torch.Tensor, first: int, end: int) -> None:
            """Sends what is complete with the elements from `first` to `end`."""
            while waiting and first <= waiting[0].place.start and waiting[0].place.stop <= end:
                segment = waiting.pop(0)
                segment.fill(number, branch.total(vector, segment.place))
                segment.send_sums()

        def ready(vector: torch.Tensor, first: int) -> None:
            send(vector, first, self.layout.num_parameters)

        leaf = self._leaf(branch.last, shard, counters, ready if waiting else None)
        send(leaf.vector, 0, self.layout.size)
        segments[-1].fill(number, branch.total(leaf.vector, segments[-1].place))
        return [*scores, branch.score(leaf.scores)]

    def _receive(self, num_rows: int, num_filled: int) -> None:
        """Receives all segments, averages this worker's slices, and receives those of the others."""
        for segment in self.segments:
            segment.receive_sums()
            self._average(segment.sums, segment.first, segment.mean, num_rows, num_filled)
            segment.send_means()
        for segment in self.segments:
            segment.receive_means()

    def _row_counts(self, num_rows: int) -> list[int]:
        """Rows of each worker's shards in a batch."""
        num_shards = self.root[1]
        ends = [[training_rows(num_rows, num_shards, s) for s in (nodes[0][0], nodes[-1][1] - 1)] for nodes in self.covers]
        return [last.stop - first.start for first, last in ends]

    def _add_up(
        self, node: Node, shard: ComputeShard, counters: torch.Tensor, depth: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of `node` and its scores; raises `counters`.

        The sum is a leaf's own vector, which the next shard may overwrite, or float64 and this node's.
        """
        branch = self._branch(node, shard, counters, depth)
        leaf = self._leaf(branch.last, shard, counters)
        return branch.total(leaf.vector, slice(None)), branch.score(leaf.scores)

    def _branch(self, node: Node, shard: ComputeShard, counters: torch.Tensor, depth: int = 0) -> _Branch:
        """Computes all shards below `node` but the last one."""
        lefts = []
        while not _is_leaf(node):
            left, node = children(node)
            vector, scores = self._add_up(left, shard, counters, depth)
            total = self._sum_at(depth)
            if _is_leaf(left):  # else it is there already
                total.copy_(vector)
            lefts.append((total, scores))
            depth += 1
        return _Branch(node[0], lefts)

    def _leaf(self, number: int, shard: ComputeShard, counters: torch.Tensor, ready: Ready | None = None) -> Shard:
        leaf = shard(number, ready)
        torch.maximum(counters, leaf.counters, out=counters)
        return leaf

    def _average(self, parts: dict[Node, torch.Tensor], first: int, means: torch.Tensor, num_rows: int, num_filled: int) -> None:
        """Writes the means of elements from `first` on: sums in tree order, rounded once at the end.

        It goes block by block, since a processor's cache holds the float64 values of a block and not those of a vector.
        """
        end = min(len(means), self.layout.size - first)
        for start in range(0, end, self._block):
            stop = min(start + self._block, end)
            out = means[start:stop]
            total = _combine({node: part[start:stop] for node, part in parts.items()}, self.root)
            split = min(max(self.layout.num_parameters - first - start, 0), stop - start)
            _divide(total[:split], num_rows, out[:split])
            _divide(total[split:], num_filled, out[split:])

    def _sum_at(self, depth: int) -> torch.Tensor:
        """A float64 vector to add up in; one a level of the tree is enough."""
        if depth == len(self._scratch):
            self._scratch.append(torch.empty(self.layout.size, dtype=torch.float64, device=self.device))
        return self._scratch[depth]

    def _total(self, counters: torch.Tensor, scores: torch.Tensor, flags: torch.Tensor, rows: list[int]) -> Total:
        loss, correct, *extra = scores.tolist()
        return Total(self._mean, counters.to(torch.int64), loss, correct, list(map(int, flags.tolist())), rows, extra)


@dataclass
class _Branch:
    """A node without its last leaf.

    Attributes:
        last: number of the leaf's shard.
        lefts: float64 sums, and scores, of the left halves on the way down to it; they go up into those above them.
    """

    last: int
    lefts: list[tuple[torch.Tensor, torch.Tensor]]

    def total(self, leaf: torch.Tensor, part: slice) -> torch.Tensor:
        """The node's sum of a part of the vector, to be asked for once."""
        total = leaf[part]
        for left, _ in reversed(self.lefts):
            total = left[part].add_(total)
        return total

    def score(self, leaf: torch.Tensor) -> torch.Tensor:
        """The node's scores."""
        for _, left in reversed(self.lefts):
            leaf = left + leaf
        return leaf


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
