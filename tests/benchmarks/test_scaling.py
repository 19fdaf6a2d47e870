"""The scaling model against the engine's own buffers, and against itself."""

from __future__ import annotations

import pytest
import torch

from raytrain_app.elastic.reduce import Layout, Reducer
from tests.benchmarks.scaling import Costs, Measurement, exact_bytes, exact_s, fast_s, fit

COSTS = Costs(message_s=1e-4, bytes_per_s=1e9, sum_s=2e-9, update_s=1e-9)
PARAMETERS = 1 << 20


@pytest.mark.parametrize(("workers", "shards"), [(2, 2), (2, 8), (3, 8), (4, 8), (5, 8), (8, 8), (16, 16), (7, 64)])
def test_bytes_are_those_that_the_engine_receives(workers: int, shards: int) -> None:
    received = []
    for rank in range(workers):
        reducer = Reducer(rank, workers, shards, Layout(PARAMETERS), 0, torch.device("cpu"))
        (segment,) = reducer.segments
        segment.fit([0] * workers)
        sums = sum(part.nbytes for node, part in segment.sums.items() if node not in reducer.covers[rank])
        received.append(sums + (workers - 1) * segment.mean.nbytes)
    assert exact_bytes(PARAMETERS, workers, shards) == pytest.approx(max(received), rel=1e-3)


def test_fit_finds_the_constants_again() -> None:
    measurements = [
        Measurement(n, 2 * COSTS.message_s + exact_bytes(n, 2, 2) / COSTS.bytes_per_s, COSTS.sum_s * n, COSTS.update_s * n)
        for n in (8_000, 100_000, 1_000_000, 25_000_000)
    ]
    found = fit(measurements)
    assert found.message_s == pytest.approx(COSTS.message_s)
    assert found.bytes_per_s == pytest.approx(COSTS.bytes_per_s)
    assert found.sum_s == pytest.approx(COSTS.sum_s)
    assert found.update_s == pytest.approx(COSTS.update_s)


def test_one_worker_exchanges_nothing_and_more_workers_compute_less() -> None:
    assert exact_bytes(PARAMETERS, 1, 64) == 0
    times = [exact_s(COSTS, PARAMETERS, 100.0, workers, workers) for workers in (1, 2, 4, 8, 16)]
    assert times == sorted(times, reverse=True)
    assert fast_s(COSTS, PARAMETERS, 100.0, 1) == pytest.approx(100.0 + COSTS.update_s * PARAMETERS)


def test_the_sums_of_long_vectors_hide_behind_the_last_shard() -> None:
    parameters, compute_s = 10_000_000, 1000.0
    alone = compute_s / 4 + COSTS.update_s * parameters + COSTS.sum_s * parameters
    means_s = 3 * COSTS.message_s + 3 * parameters / COSTS.bytes_per_s
    assert exact_s(COSTS, parameters, compute_s, 4, 4) == pytest.approx(alone + means_s)
    assert exact_s(COSTS, parameters, 0.0, 4, 4) == pytest.approx(alone - compute_s / 4 + 2 * means_s)


def test_fast_hides_its_exchange_while_computing_is_long_enough() -> None:
    assert fast_s(COSTS, PARAMETERS, 100.0, 4) == pytest.approx(25.0 + COSTS.update_s * PARAMETERS)
    assert exact_s(COSTS, PARAMETERS, 100.0, 4, 4) > fast_s(COSTS, PARAMETERS, 100.0, 4)
