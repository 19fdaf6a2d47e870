"""Pieces of a long vector: each element once, and the same bits for any number of threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from raytrain_app.strategies.parameter_server.correction import Correction
from raytrain_app.strategies.parameter_server.pieces import LONG, Pieces
from raytrain_app.strategies.parameter_server.shard import Policy, Push, Shard, ShardState
from raytrain_app.strategies.parameter_server.update import Update

NOTHING = torch.zeros(0, dtype=torch.int64)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [0, 1, 1000, LONG, 3 * LONG + 777])
def test_each_element_comes_once(size: int, threads: int) -> None:
    seen, names = np.zeros(size, np.int64), set()

    def work(piece: slice) -> None:
        seen[piece] += 1
        names.add(threading.get_ident())

    Pieces(threads).each(size, 1 << 18, work)
    assert (seen == 1).all()
    if size < LONG:
        assert names <= {threading.get_ident()}, "a short one is not worth a thread"


def test_an_error_in_a_thread_is_raised() -> None:
    def work(piece: slice) -> None:
        if piece.start:
            raise ValueError("of a thread")

    with pytest.raises(ValueError, match="of a thread"):
        Pieces(2).each(2 * LONG, 2 * LONG, work)


@pytest.mark.parametrize("correction", ["none", "gap", "delay"])
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "adam"])
def test_threads_change_no_bit(rule: str, correction: str) -> None:
    policy = Policy(Update(rule), Correction(correction), num_parameters=LONG + 777)  # type: ignore[arg-type]
    size = policy.num_parameters + 5
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0))
    found = []
    for threads in (1, 3):
        slots = Shard.new_slots(policy, policy.num_parameters, torch.float32)
        state = ShardState(0, size, np.ones(size, np.float32), slots, np.zeros(0, np.int64))
        shard = Shard(policy, state, Pieces(threads))
        for lease in range(3):
            base = shard.versions.current * 0.9
            shard.apply(Push(lease, gradient * (lease + 1), NOTHING, max(0, lease - 1), 0.1, 1), base)
        found.append([shard.versions.current.clone(), *shard.slots.values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not torch.equal(found[0][0], torch.ones(size))
