"""Messages between members: what arrives, and that whoever is left is told at once when another one dies in the middle."""

from __future__ import annotations

import datetime
import importlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raytrain_app.elastic.exchange import PeerLost, broadcast, broadcast_bytes, disconnect, gather
from raytrain_app.elastic.reduce import Layout, Reducer, Shard
from tests.unit.elastic.test_reduce import run_workers
from tests.unit.learners.test_torch import CLASSES, FEATURES, make_learner, rows

WORKERS, LARGE = 5, 3 << 20
KILLS = 12


def join(rank: int, world_size: int, path: Path, timeout_s: float = 60.0) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size, timeout=limit)


def worker(rank: int, folder: Path) -> None:
    join(rank, WORKERS, folder / "rendezvous")
    assert gather(torch.tensor([rank, -rank])).tolist() == [[other, -other] for other in range(WORKERS)]
    many = gather(torch.full((LARGE,), rank, dtype=torch.uint8))
    assert (many == torch.arange(WORKERS).view(-1, 1)).all()
    for source in range(WORKERS):
        tensor = torch.full((LARGE,), float(rank))
        broadcast(tensor, source)
        assert (tensor == source).all()
    assert broadcast_bytes(b"" if rank == 1 else None, 1) == b""
    data = os.urandom(LARGE)
    found = broadcast_bytes(data if rank == 2 else None, 2)
    for receivers in ([4], [0, 3], [1, 3, 4], [0, 1, 3, 4]):
        tensor = torch.full((3,), float(rank))
        if rank in (2, *receivers):
            broadcast(tensor, 2, receivers=receivers)
        assert (tensor == (2 if rank in receivers else rank)).all()
    (folder / str(rank)).write_bytes(found)
    gather(torch.zeros(1))
    disconnect()


def test_what_is_sent_arrives(tmp_path: Path) -> None:
    assert run_workers(worker, WORKERS, tmp_path) == [0] * WORKERS
    found = [(tmp_path / str(rank)).read_bytes() for rank in range(WORKERS)]
    assert len(found[0]) == LARGE
    assert found == found[:1] * WORKERS


def reduce_until_lost(rank: int, size: int) -> None:
    shard = Shard(torch.ones(size), torch.empty(0, dtype=torch.int64), torch.zeros(2, dtype=torch.float64))
    reducer = Reducer(rank, 2, 2, Layout(size), 1, torch.device("cpu"))
    while True:
        reducer.reduce(lambda number, ready: shard, 2, 2, [0])


def broadcast_until_lost(rank: int, size: int) -> None:
    tensor = torch.ones(size)
    while True:
        broadcast(tensor, 0)


def gather_until_lost(rank: int, size: int) -> None:
    values = torch.ones(size)
    while True:
        gather(values)


class Large(nn.Sequential):
    """With so many parameters in several layers, of which DistributedDataParallel makes buckets, and as many buffers."""

    def __init__(self, size: int) -> None:
        wide = size // 4 // FEATURES
        super().__init__(*(layer for _ in range(4) for layer in (nn.Linear(FEATURES, wide), nn.Linear(wide, FEATURES))))
        self.append(nn.Linear(FEATURES, CLASSES))
        self.register_buffer("table", torch.ones(size))


def train_until_lost(rank: int, size: int) -> None:
    learner = make_learner(lambda: Large(size // 4), optimizer={"name": "sgd"})
    learner.connect(2, 1)
    while True:
        learner.fast_shard(*rows(1, seed=rank), 0, 2, [0])


WAYS = {"reduce": reduce_until_lost, "broadcast": broadcast_until_lost, "gather": gather_until_lost, "train": train_until_lost}


def kill_often(rank: int, way: str, size: int, folder: Path) -> None:
    """Has rank 1 of a pair die after a random time, and rank 0 note how long it took to know of it. Forks, to be quick."""
    importlib.import_module("torch._dynamo")  # which DistributedDataParallel loads, once for all forks
    delays = random.Random(size)
    for number in range(KILLS):
        delay_s, children = delays.uniform(0.001, 0.06), []
        for member in range(2):
            if child := os.fork():
                children.append(child)
                continue
            try:
                join(member, 2, folder / f"rendezvous-{number}", timeout_s=20.0)
                gather(torch.zeros(1))
                began_s = time.monotonic()
                if member == 1:
                    signal.setitimer(signal.ITIMER_REAL, delay_s)  # nobody handles its signal, which ends the process
                WAYS[way](member, size)
            except PeerLost:
                disconnect()
                (folder / f"lost-{number}").write_text(str(time.monotonic() - began_s - delay_s))
            finally:
                os._exit(0)
        for child in children:
            os.waitpid(child, 0)


@pytest.mark.parametrize(("way", "size"), [("reduce", 100_000), *((way, 8_000_000) for way in WAYS)])
def test_a_member_that_dies_in_the_middle_is_told_at_once(way: str, size: int, tmp_path: Path) -> None:
    """Also while something is on its way to it: gloo's own collectives would wait for the time-out, in one of four such cases."""
    assert run_workers(kill_often, 1, way, size, tmp_path) == [0]
    took_s = [float(path.read_text()) for path in tmp_path.glob("lost-*")]
    assert len(took_s) == KILLS
    assert max(took_s) < 10.0, sorted(took_s)
