"""A vector in segments, which travel while the shard is still computed: the same bits, and nothing is sent too early."""

from __future__ import annotations

import functools
import math
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from raytrain_app.elastic import segments
from raytrain_app.elastic.exchange import PeerLost, disconnect
from raytrain_app.elastic.plan import Node, cover, owned_shards, training_rows
from raytrain_app.elastic.reduce import Layout, Ready, Reducer, Shard
from raytrain_app.elastic.segments import Members, cut
from tests.unit.elastic.test_reduce import digest, make_shard, plain_mean, run_workers

ROWS, FLAGS = 60, 2
LAYOUTS = (Layout(5_000), Layout(5_000, 40, 1), Layout(700, 2_500), Layout(2_048))
SHARDS = (4, 7)
PIECE = 300


def use_small_segments() -> None:
    segments.SEGMENT_BYTES, segments.SLICE_BYTES, segments.ROUND_BYTES = 2048, 0, 0


def in_pieces(layout: Layout, number: int, ready: Ready | None) -> Shard:
    """Gradients come from the last one to the first, buffers at the very end; what has not come yet is no number."""
    whole = make_shard(layout, number)
    vector = torch.full_like(whole.vector, math.nan)
    for first in range(layout.num_parameters - PIECE, -PIECE, -PIECE):
        place = slice(max(0, first), first + PIECE)
        vector[place] = whole.vector[place]
        if ready is not None:
            ready(vector, place.start)
    vector[layout.num_parameters :] = whole.vector[layout.num_parameters :]
    return Shard(vector, whole.counters, whole.scores)


def worker(rank: int, world_size: int, folder: str) -> None:
    use_small_segments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    found = []
    for num_shards in SHARDS:
        for layout in LAYOUTS:
            reducer = Reducer(rank, world_size, num_shards, layout, FLAGS, torch.device("cpu"))
            assert len(reducer.segments) > 3
            mine = owned_shards(rank, world_size, num_shards)
            spans = [training_rows(ROWS, num_shards, shard) for shard in (mine[0], mine[-1])]
            ids = list(range(spans[0].start, spans[1].stop))
            for _ in range(2):
                total = reducer.reduce(functools.partial(in_pieces, layout), ROWS, num_shards, [rank, 0], ids)
            assert total.flags == [world_size - 1, 0]
            assert total.rows == list(range(ROWS))
            found.append(digest(total.mean.numpy(), total.counters.numpy(), total.loss, total.correct))
    Path(folder, str(rank)).write_text("\n".join(found))
    disconnect()


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_are_those_of_the_whole_vector(world_size: int, tmp_path: Path) -> None:
    assert run_workers(worker, world_size, world_size, str(tmp_path)) == [0] * world_size
    expected = []
    for num_shards in SHARDS:
        for layout in LAYOUTS:
            shards = [make_shard(layout, number) for number in range(num_shards)]
            mean = plain_mean([shard.vector.numpy() for shard in shards], layout.num_parameters, ROWS)
            alone = Reducer(0, 1, num_shards, layout, 0, torch.device("cpu"))
            total = alone.reduce(functools.partial(make_shard, layout), ROWS, num_shards, [])
            assert total.mean.numpy().tobytes() == mean.tobytes()
            expected.append(digest(mean, total.counters.numpy(), total.loss, total.correct))
    for rank in range(world_size):
        assert Path(tmp_path, str(rank)).read_text().split("\n") == expected, rank


def failing_worker(rank: int, kind: str, folder: str) -> None:
    """With some segments sent, rank 1 dies or its shard fails; the other one learns that it is gone, and both end."""
    use_small_segments()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    layout, calls = Layout(5_000), 0
    reducer = Reducer(rank, 2, 2, layout, FLAGS, torch.device("cpu"))

    def shard(number: int, ready: Ready | None) -> Shard:
        def struck(vector: torch.Tensor, first: int) -> None:
            nonlocal calls
            calls += 1
            if rank == 1 and calls == 5:
                if kind == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("the task's own")
            assert ready is not None
            ready(vector, first)

        return in_pieces(layout, number, struck)

    try:
        reducer.reduce(shard, ROWS, 2, [0] * FLAGS)
    except PeerLost:
        Path(folder, f"{rank}-lost").touch()
    except RuntimeError as error:
        Path(folder, f"{rank}-{error}").touch()
    disconnect()


@pytest.mark.parametrize("kind", ["dies", "fails"])
def test_a_worker_that_fails_with_segments_under_way(kind: str, tmp_path: Path) -> None:
    assert run_workers(failing_worker, 2, kind, str(tmp_path)) == [0, -9 if kind == "dies" else 0]
    left = {path.name for path in tmp_path.iterdir()} - {"rendezvous"}
    own = "1-the task's own"
    assert left == ({"0-lost"} if kind == "dies" else {"0-lost", own})


def members(world_size: int, num_shards: int = 8, rank: int = 0) -> Members:
    root: Node = (0, num_shards)
    covers = [cover(owned_shards(rank, world_size, num_shards), root) for rank in range(world_size)]
    return Members(rank, covers, torch.float32, torch.float64, torch.device("cpu"), None)


def test_all_workers_agree_on_the_number_of_rounds() -> None:
    """Also those that have more nodes than others, as with 8 shards on 3 workers."""
    for num_shards in range(2, 17):
        for world_size in range(2, min(num_shards, 8) + 1):
            all_members = [members(world_size, num_shards, rank) for rank in range(world_size)]
            for size in range(1_000, 150_000, 499):
                assert len({one.two_rounds_cost_more(size) for one in all_members}) == 1, (num_shards, world_size, size)


@pytest.mark.parametrize("world_size", [2, 3, 7])
@pytest.mark.parametrize("size", [1, 15, 5_000_000, 12_345_678])
def test_segments_cover_the_vector_once_and_are_not_small(world_size: int, size: int) -> None:
    found, means = cut(members(world_size), size, size)
    assert means.shape == (size,)
    places = sorted((segment.place.start, segment.place.stop) for segment in found)
    assert [start for start, _ in places] == [0, *(stop for _, stop in places[:-1])]
    assert places[-1][1] == size
    assert [segment.place.start for segment in found] == sorted((start for start, _ in places), reverse=True)
    if len(found) > 1:
        assert all(stop - start >= segments.SEGMENT_BYTES // 4 for start, stop in places[:-1])


def test_many_workers_have_larger_segments() -> None:
    found, _ = cut(members(64, 64), 100_000_000, 100_000_000)
    assert len(found) == 400_000_000 // (64 * segments.SLICE_BYTES)


def test_what_comes_late_is_sent_last() -> None:
    found, _ = cut(members(2), 12_000_000, 9_000_000)
    late = [segment.place.stop > 9_000_000 for segment in found]
    assert sum(late) > 1
    assert late == sorted(late)
