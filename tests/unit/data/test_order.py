"""The order of an epoch: every row once, whatever the sizes, and never dependent on anything but seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_app.data import Blocks, Split, epoch_order
from raytrain_app.data.split import hold_out


def make_split(block_rows: list[int], window: int, every: int = 1) -> Split:
    starts = (0, *np.cumsum(block_rows).tolist())
    return Split(Blocks((), starts, (2,), "uint8", window), np.arange(0, starts[-1], every))


sizes = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(
    block_rows=sizes, window=st.integers(0, 5), every=st.integers(1, 3), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 9)
)
@pytest.mark.parametrize("mode", ["global", "windowed"])
def test_every_row_once_an_epoch_over_any_batches_shards_and_workers(
    mode: str, block_rows: list[int], window: int, every: int, seed: int, epoch: int
) -> None:
    split = make_split(block_rows, window, every)
    order = epoch_order(split, seed, epoch, mode)
    batch, shards = 1 + seed % 17, 1 + seed % 5
    for workers in range(1, shards + 1):
        seen = []
        for step in range(0, len(order), batch):
            cuts = np.array_split(order[step : step + batch], shards)
            for rank in range(workers):
                seen += [cut for shard, cut in enumerate(cuts) if shard * workers // shards == rank]
        assert np.array_equal(np.sort(np.concatenate(seen)), split.ids)


@given(block_rows=sizes, window=st.integers(0, 5), seed=st.integers(0, 2**63 - 1), cut=st.integers(0, 1000))
@pytest.mark.parametrize("mode", ["global", "windowed"])
def test_a_resume_at_any_step_gives_the_rest(mode: str, block_rows: list[int], window: int, seed: int, cut: int) -> None:
    split = make_split(block_rows, window)
    before = epoch_order(split, seed, 3, mode)
    after = epoch_order(make_split(block_rows, window), seed, 3, mode)
    cut %= len(split)
    assert np.array_equal(np.sort(np.concatenate([before[:cut], after[cut:]])), split.ids)


@given(block_rows=st.lists(st.integers(1, 60), min_size=4, max_size=12), window=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_windowed_uses_few_blocks_at_a_time(block_rows: list[int], window: int, seed: int) -> None:
    split = make_split(block_rows, window)
    order = epoch_order(split, seed, 0, "windowed")
    blocks = np.searchsorted(split.blocks.starts, order, side="right") - 1
    windows: list[set[int]] = [set()]
    for block in blocks.tolist():
        if block not in windows[-1] and len(windows[-1]) == window:
            windows.append(set())
        windows[-1].add(block)
    # Each block is in one window only, and each window but the last is full.
    assert sum(len(some) for some in windows) == len(block_rows)
    assert all(len(some) == window for some in windows[:-1])


@pytest.mark.parametrize("mode", ["global", "windowed"])
def test_epochs_and_seeds_differ_and_repeat(mode: str) -> None:
    split = make_split([50, 50, 50], 2)
    orders = {(seed, epoch): epoch_order(split, seed, epoch, mode).tobytes() for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9
    assert orders[1, 2] == epoch_order(split, 1, 2, mode).tobytes()


def test_order_is_the_same_on_every_machine_and_numpy() -> None:
    split = make_split([5, 5], 1)
    assert epoch_order(split, 7, 0, "global").tolist() == [8, 6, 0, 4, 9, 3, 5, 2, 7, 1]
    assert epoch_order(split, 7, 0, "windowed").tolist() == [8, 6, 9, 5, 7, 0, 4, 3, 2, 1]
    assert [ids.tolist() for ids in hold_out(np.arange(10) % 2, 0.4, 7)] == [[2, 3, 6, 7, 8, 9], [0, 1, 4, 5]]


def test_large_seeds_do_not_collide_with_epochs() -> None:
    split = make_split([100], 0)
    assert not np.array_equal(epoch_order(split, 1, 1, "global"), epoch_order(split, 1 + (1 << 32), 0, "global"))


def test_windowed_rows_are_shuffled_within_a_window() -> None:
    split = make_split([100, 100], 1)
    first = epoch_order(split, 0, 0, "windowed")[:100]
    assert abs(np.corrcoef(first, np.arange(100))[0, 1]) < 0.3
