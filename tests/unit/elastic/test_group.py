"""Process groups in place: one that failed leaves nothing behind, and one with a silent member can be broken off."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch

from raytrain_app.elastic.exchange import PeerLost, broadcast_bytes
from raytrain_app.elastic.group import Group, Rendezvous
from raytrain_app.elastic.reduce import NUM_SCORES, Layout, Ready, Reducer, Shard
from raytrain_app.elastic.roster import Generation

HOST, CPU = "127.0.0.1", torch.device("cpu")


def group(number: int, rank: int, port: int, timeout_s: float = 60.0) -> Group:
    """Of two members."""
    return Group(Generation(number, rank, ("leader", "other"), HOST, port, 0, (1,), 0), timeout_s, CPU)


def other(port: int, pipe: Connection) -> None:
    """The second member: connects in the generations that it is told, and echoes what the leader sends."""
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        member = group(number, 1, port)
        try:
            member.connect(20.0)
            pipe.send(broadcast_bytes(None, 0))
        except PeerLost:
            pipe.send(b"lost")
        finally:
            member.close()


@pytest.fixture
def rendezvous() -> Rendezvous:
    """The leader's store."""
    return Rendezvous(HOST)


@pytest.fixture
def member(rendezvous: Rendezvous) -> Iterator[tuple[BaseProcess, Connection]]:
    """The second member, in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=other, args=(rendezvous.port, theirs), daemon=True)
    process.start()
    assert mine.recv() == "ready"
    yield process, mine
    process.kill()
    process.join()


def test_a_member_that_does_not_come_is_no_trouble_later(rendezvous: Rendezvous, member: tuple[BaseProcess, Connection]) -> None:
    """Who was left alone in a generation must find its peer in the next one, though the peer knows nothing of it."""
    _, pipe = member
    alone = group(1, 0, rendezvous.port)
    with pytest.raises(PeerLost):
        alone.connect(0.5)
    alone.close()
    pipe.send(2)
    together = group(2, 0, rendezvous.port)
    together.connect(20.0)
    broadcast_bytes(b"hello", 0)
    assert pipe.recv() == b"hello"
    together.close()


def test_a_slow_member_is_waited_for_longer_than_until_it_has_connected(
    rendezvous: Rendezvous, member: tuple[BaseProcess, Connection]
) -> None:
    """Gloo's messages would take the time-out that the group had while it connected."""
    process, pipe = member
    leader = group(1, 0, rendezvous.port)
    pipe.send(1)
    leader.connect(2.0)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(4.0, os.kill, (process.pid, signal.SIGCONT)).start()
    broadcast_bytes(b"hello", 0)  # ends when it has been received
    assert pipe.recv() == b"hello"
    leader.close()


def leave_in_the_middle(port: int) -> None:
    """Is through with one reduction, of which something is kept, and leaves in another one."""
    member = group(1, 1, port)
    member.connect(20.0)
    done, under_way = reducers(1)
    done.reduce(shard, 2, 2, [0])
    with suppress(ZeroDivisionError):
        under_way.reduce(lambda number, ready: shard(number // 0, ready), 2, 2, [0])
    member.close()
    time.sleep(20.0)


def reducers(rank: int) -> tuple[Reducer, Reducer]:
    return Reducer(rank, 2, 2, Layout(), 1, CPU), Reducer(rank, 2, 2, Layout(), 1, CPU)


def shard(number: int, ready: Ready | None) -> Shard:
    return Shard(torch.empty(0), torch.empty(0, dtype=torch.int64), torch.zeros(NUM_SCORES, dtype=torch.float64))


def test_a_member_that_leaves_is_told_at_once(rendezvous: Rendezvous) -> None:
    """Whatever it still holds of the exchanges in which it took part."""
    process = multiprocessing.get_context("spawn").Process(target=leave_in_the_middle, args=(rendezvous.port,), daemon=True)
    process.start()
    leader = group(1, 0, rendezvous.port)
    leader.connect(20.0)
    done, under_way = reducers(0)
    done.reduce(shard, 2, 2, [0])
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        under_way.reduce(shard, 2, 2, [0])
    assert time.monotonic() - started_s < 5.0
    leader.close()
    process.kill()
    process.join()


@pytest.mark.parametrize("connected", [True, False], ids=["in a collective", "while connecting"])
def test_a_silent_member_holds_nobody_up(connected: bool, rendezvous: Rendezvous, member: tuple[BaseProcess, Connection]) -> None:
    process, pipe = member
    leader = group(1, 0, rendezvous.port)
    pipe.send(1 if connected else 2)
    if connected:
        leader.connect(20.0)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    held_up = partial(leader.gather_ints, [1], 1) if connected else partial(leader.connect, 20.0)
    threading.Timer(0.5, leader.break_off).start()
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        held_up()
    assert time.monotonic() - started_s < 5
    leader.close()
