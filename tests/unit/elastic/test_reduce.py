"""The exact reduction: the same bits for any number of workers, and never worse than a float32 sum."""

from __future__ import annotations

import functools
import hashlib
import math
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from raytrain_app.elastic.exchange import PeerLost, disconnect
from raytrain_app.elastic.reduce import BLOCK, Layout, Ready, Reducer, Shard
from raytrain_app.elastic.segments import ROUND_BYTES

MAX_WORLD = 4
SHARDS = (4, 5, 8)
ROWS = (64, 60)
"""Powers of two are divided by in another way than other numbers."""
LAYOUTS = (
    Layout(0, 0, 0),
    Layout(7, 3, 2),
    Layout(1001, 0, 1, torch.float64),
    Layout(25_000, 0, 0),
    Layout(ROUND_BYTES // 4 + 33, 5, 0),
)


def make_shard(layout: Layout, number: int, ready: Ready | None = None) -> Shard:
    """Values of very different magnitudes, so that any change of order would change bits."""
    rng = np.random.default_rng(number)
    values = rng.normal(size=layout.size) * 10.0 ** rng.integers(-30, 30, layout.size)
    counters = torch.from_numpy(rng.integers(0, 9, layout.num_counters))
    return Shard(torch.from_numpy(values).to(layout.dtype), counters, torch.tensor([0.1 * number, number], dtype=torch.float64))


def digests(rank: int, world_size: int) -> list[str]:
    """One hash for each number of shards, layout and number of rows: of the second reduction, since buffers are reused."""
    found = []
    for num_shards in SHARDS:
        for layout in LAYOUTS:
            reducer = Reducer(rank, world_size, num_shards, layout, 3, torch.device("cpu"))
            for num_rows in ROWS:
                for _ in range(2):
                    total = reducer.reduce(functools.partial(make_shard, layout), num_rows, num_shards, [rank, 0, 1])
                assert total.flags == [world_size - 1, 0, 1]
                found.append(digest(total.mean.numpy(), total.counters.numpy(), total.loss, total.correct))
    return found


def digest(mean: np.ndarray, counters: np.ndarray, loss: float, correct: float) -> str:
    return hashlib.sha256(mean.tobytes() + counters.tobytes() + repr((loss, correct)).encode()).hexdigest()


def plain_sum(parts: list[np.ndarray]) -> np.ndarray:
    """The sum along the fixed tree in float64, as it is defined: the left half holds the largest power of two of the parts."""
    if len(parts) == 1:
        return parts[0].astype(np.float64)
    half = 1 << ((len(parts) - 1).bit_length() - 1)
    return np.asarray(plain_sum(parts[:half]) + plain_sum(parts[half:]))


def plain_mean(vectors: list[np.ndarray], num_parameters: int, num_rows: int) -> np.ndarray:
    """The reference: everything in float64, rounded once."""
    total = plain_sum(vectors)
    total[:num_parameters] /= num_rows
    total[num_parameters:] /= len(vectors)
    with np.errstate(over="ignore"):
        return total.astype(vectors[0].dtype)


def plain_digests() -> list[str]:
    """What `digests` must be."""
    found = []
    for num_shards in SHARDS:
        for layout in LAYOUTS:
            shards = [make_shard(layout, number) for number in range(num_shards)]
            loss, correct = plain_sum([shard.scores.numpy() for shard in shards]).tolist()
            counters = np.max([shard.counters.numpy() for shard in shards], axis=0)
            for num_rows in ROWS:
                mean = plain_mean([shard.vector.numpy() for shard in shards], layout.num_parameters, num_rows)
                found.append(digest(mean, counters, loss, correct))
    return found


def worker(rank: int, ports: list[int], folder: str) -> None:
    torch.set_num_threads(1)
    for world_size in range(2, MAX_WORLD + 1):
        if rank < world_size:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[world_size]}", rank=rank, world_size=world_size)
            Path(folder, f"{world_size}-{rank}").write_text("\n".join(digests(rank, world_size)))
            disconnect()


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def run_workers(target: object, number: int, *arguments: object) -> list[int | None]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=(rank, *arguments), daemon=True) for rank in range(number)]  # type: ignore[arg-type]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    for process in processes:  # one that hangs has no code
        process.kill()
    return codes


def test_same_bits_for_any_number_of_workers(tmp_path: Path) -> None:
    assert run_workers(worker, MAX_WORLD, free_ports(MAX_WORLD + 1), str(tmp_path)) == [0] * MAX_WORLD
    expected = plain_digests()
    assert digests(0, 1) == expected
    for world_size in range(2, MAX_WORLD + 1):
        for rank in range(world_size):
            assert Path(tmp_path, f"{world_size}-{rank}").read_text().split("\n") == expected, (world_size, rank)


def dying_worker(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    layout = Layout(100, 0, 0)
    reducer = Reducer(rank, 2, 2, layout, 1, torch.device("cpu"))

    def shard(number: int, ready: Ready | None) -> Shard:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return make_shard(layout, number)

    try:
        reducer.reduce(shard, 2, 2, [0])
    except PeerLost:
        Path(folder, "lost").write_text("")
    disconnect()


def test_a_dead_peer_is_told_apart_from_an_error_in_a_shard(tmp_path: Path) -> None:
    assert run_workers(dying_worker, 2, free_ports(1)[0], str(tmp_path)) == [0, -9]
    assert (tmp_path / "lost").exists()
    reducer = Reducer(0, 1, 2, Layout(100, 0, 0), 1, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="shapes"):
        reducer.reduce(raise_shapes, 2, 2, [0])


def raise_shapes(number: int, ready: Ready | None) -> Shard:
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


ADVERSARIAL: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "mixed magnitudes": lambda rng, n: rng.normal(size=n) * 10.0 ** rng.integers(-37, 38, n),
    "subnormal": lambda rng, n: rng.normal(size=n) * 1e-41,
    "huge": lambda rng, n: rng.uniform(-1, 1, n) * 3.4e38,
    "zero": lambda rng, n: np.zeros(n),
    "ordinary": lambda rng, n: rng.normal(size=n),
    "one large among tiny": lambda rng, n: np.where(rng.random(n) < 0.01, 1e20, 1e-20) * rng.normal(size=n),
}


@pytest.mark.parametrize("kind", ADVERSARIAL)
@pytest.mark.parametrize("num_shards", [2, 4, 7, 64])
def test_error_is_at_most_that_of_a_correctly_rounded_sum(kind: str, num_shards: int) -> None:
    rng = np.random.default_rng(num_shards)
    size = 500
    shards = [np.clip(ADVERSARIAL[kind](rng, size), -3.4e38, 3.4e38).astype(np.float32) for _ in range(num_shards)]
    reducer = Reducer(0, 1, num_shards, Layout(size), 0, torch.device("cpu"))
    scores = torch.zeros(2, dtype=torch.float64)
    none = torch.zeros(0, dtype=torch.int64)
    mean = reducer.reduce(lambda v, _: Shard(torch.from_numpy(shards[v]), none, scores), num_shards, num_shards, []).mean.numpy()

    exact = np.array([math.fsum(float(s[i]) for s in shards) / num_shards for i in range(size)])
    naive = np.add.reduce(np.stack(shards), axis=0, dtype=np.float32) / np.float32(num_shards)
    magnitude = np.abs(np.stack(shards).astype(np.float64)).sum(0) / num_shards
    half_ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64) / 2
    error = np.abs(mean.astype(np.float64) - exact)
    assert (error <= half_ulp + magnitude * 2.0**-50).all()
    with np.errstate(invalid="ignore"):
        naive_error = np.nan_to_num(np.abs(naive.astype(np.float64) - exact), nan=np.inf)
    assert error.max() <= naive_error.max()


@pytest.mark.parametrize("kind", ADVERSARIAL)
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 3, 7, 64, 1000, 65535])
def test_bits_are_those_of_the_plain_implementation(kind: str, num_shards: int, num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    size = BLOCK + 100
    vectors = [np.clip(ADVERSARIAL[kind](rng, size), -3.4e38, 3.4e38).astype(np.float32) for _ in range(num_shards)]
    none, scores = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    reducer = Reducer(0, 1, num_shards, Layout(size - 50, 50), 0, torch.device("cpu"))
    total = reducer.reduce(lambda v, _: Shard(torch.from_numpy(vectors[v]), none, scores), num_rows, num_shards, [])
    assert total.mean.numpy().tobytes() == plain_mean(vectors, size - 50, num_rows).tobytes()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinities_and_nan_come_through(bad: float) -> None:
    reducer = Reducer(0, 1, 2, Layout(3), 0, torch.device("cpu"))
    none, scores = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    total = reducer.reduce(lambda v, _: Shard(torch.tensor([1.0, bad if v else 1.0, 1.0]), none, scores), 2, 2, [])
    assert torch.isfinite(total.mean).tolist() == [True, False, True]
