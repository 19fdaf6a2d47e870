"""Shards, ownership and the tree: pure functions, checked for many sizes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_app.elastic.plan import (
    children,
    cover,
    filled_shards,
    learning_rate,
    owned_shards,
    shard_rows,
    shard_seed,
    training_rows,
)

shards_and_workers = st.integers(1, 64).flatmap(lambda shards: st.tuples(st.just(shards), st.integers(1, shards)))


@given(st.integers(0, 1000), st.integers(1, 64))
def test_shards_cut_a_batch_without_loss_and_evenly(num_rows: int, num_shards: int) -> None:
    parts = [shard_rows(num_rows, num_shards, shard) for shard in range(num_shards)]
    assert [row for part in parts for row in range(num_rows)[part]] == list(range(num_rows))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 1000), st.integers(1, 64))
def test_no_shard_trains_on_a_single_row(num_rows: int, num_shards: int) -> None:
    parts = [training_rows(num_rows, num_shards, shard) for shard in range(num_shards)]
    assert [row for part in parts for row in range(num_rows)[part]] == list(range(num_rows))
    sizes = [part.stop - part.start for part in parts if part.stop > part.start]
    assert len(sizes) == (filled_shards(num_rows, num_shards) if num_rows else 0)
    assert all(size >= 2 for size in sizes) or num_rows == 1
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    if num_rows >= 2 * num_shards:
        assert parts == [shard_rows(num_rows, num_shards, shard) for shard in range(num_shards)]


@given(shards_and_workers)
def test_every_shard_has_one_owner_by_the_stated_rule(sizes: tuple[int, int]) -> None:
    num_shards, world_size = sizes
    for rank in range(world_size):
        assert list(owned_shards(rank, world_size, num_shards)) == [
            v for v in range(num_shards) if v * world_size // num_shards == rank
        ]


@given(shards_and_workers)
def test_covers_of_all_workers_tile_the_tree(sizes: tuple[int, int]) -> None:
    num_shards, world_size = sizes
    nodes = [node for rank in range(world_size) for node in cover(owned_shards(rank, world_size, num_shards), (0, num_shards))]
    assert [shard for low, high in nodes for shard in range(low, high)] == list(range(num_shards))
    tree = set()
    level = [(0, num_shards)]
    while level:
        tree.update(level)
        level = [child for node in level if node[1] - node[0] > 1 for child in children(node)]
    assert set(nodes) <= tree
    assert len(nodes) <= 2 * world_size * math.ceil(math.log2(num_shards) + 1)


def test_seeds_differ_between_neighbours() -> None:
    seeds = {shard_seed([0, epoch, step, shard]) for epoch in range(5) for step in range(50) for shard in range(8)}
    assert len(seeds) == 5 * 50 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + math.sqrt(0.5) / 2]),
    ],
)
def test_learning_rate_warms_up_and_decays(schedule: str, expected: list[float]) -> None:
    rates = [learning_rate(schedule, 1.0, step, 6, warmup_steps=2) for step in range(4)]
    assert rates == pytest.approx(expected)
