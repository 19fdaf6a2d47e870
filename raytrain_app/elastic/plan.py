"""Who computes what, and in which order it is added up: pure functions of (batch, shards, workers).

A global batch is cut into virtual shards. The shards are the leaves of a fixed binary tree, and gradients are added along
that tree. A worker owns a contiguous range of shards; it adds up the whole subtrees that lie inside its range, and the
nodes above them are added after the exchange. The tree depends on the number of shards alone, so the sum has the same bits
for any number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

Node = tuple[int, int]
"""A node of the tree: the shards [low, high) below it."""


def shard_rows(num_rows: int, num_shards: int, shard: int) -> slice:
    """Rows of `shard` in a batch of `num_rows`; the shards' sizes differ by at most one and may be zero."""
    return slice(num_rows * shard // num_shards, num_rows * (shard + 1) // num_shards)


def filled_shards(num_rows: int, num_shards: int) -> int:
    """Shards that get rows in a training batch: all, if that gives each of them two rows at least, else fewer."""
    return min(num_shards, max(1, num_rows // 2))


def training_rows(num_rows: int, num_shards: int, shard: int) -> slice:
    """Rows of `shard` in a training batch: as `shard_rows`, but never a single one unless the batch has no more.

    Layers that normalize over the rows, such as BatchNorm, cannot train on one row. A small last batch is therefore cut
    into fewer parts, which the first shards get.
    """
    filled = filled_shards(num_rows, num_shards)
    return shard_rows(num_rows, filled, shard) if shard < filled else slice(num_rows, num_rows)


def owned_shards(rank: int, world_size: int, num_shards: int) -> range:
    """Shards of worker `rank`: the contiguous `v` with `v * world_size // num_shards == rank`."""
    first = -(-rank * num_shards // world_size)
    last = -(-(rank + 1) * num_shards // world_size)
    return range(first, last)


def children(node: Node) -> tuple[Node, Node]:
    """The two halves of an inner node; the left one holds the largest power of two of shards that is not all of them."""
    low, high = node
    middle = low + (1 << ((high - low - 1).bit_length() - 1))
    return (low, middle), (middle, high)


def cover(owned: range, root: Node) -> list[Node]:
    """The largest nodes below `root` that lie inside `owned`, left to right: at most two a level of the tree."""
    low, high = root
    if owned.start <= low and high <= owned.stop:
        return [root]
    if high <= owned.start or owned.stop <= low:
        return []
    left, right = children(root)
    return cover(owned, left) + cover(owned, right)


def shard_seed(parts: Sequence[int]) -> int:
    """A 63-bit seed from (seed, epoch, step, shard), well mixed, so that a shard's randomness has no neighbours."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def learning_rate(schedule: str, base: float, step: int, total_steps: int, warmup_steps: int = 0) -> float:
    """Learning rate of step `step` (from 0): linear warm-up, then constant, linear to zero, or half a cosine to zero.

    The cosine is that of Loshchilov and Hutter, SGDR (2017), without restarts. A function of the step alone.
    """
    import math

    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "cosine":
        return base * 0.5 * (1.0 + math.cos(math.pi * done))
    if schedule == "linear":
        return base * (1.0 - done)
    return base
