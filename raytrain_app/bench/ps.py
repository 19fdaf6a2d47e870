"""How fast gradients and parameters move: the product's servers beside the server that most people write on Ray first.

Both run as actors on this machine and are asked by the same worker actors for rounds of one push and one pull of a whole
float32 vector. Beside them stand the two limits: a bare actor call, and one copy of the vector in memory. The product runs
as it does in training, with leases, shared memory, and its state kept elsewhere all the time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import ray
import torch

from raytrain_app.actors import Actor, start_here, wait_for
from raytrain_app.elastic.reduce import Layout
from raytrain_app.job import job_from_dict
from raytrain_app.strategies.parameter_server.client import Client
from raytrain_app.strategies.parameter_server.coordinator import Coordinator
from raytrain_app.strategies.parameter_server.services import ParameterServers
from raytrain_app.strategies.parameter_server.shard import ShardState
from raytrain_app.strategies.parameter_server.snapshot import cut_anew
from raytrain_app.strategies.parameter_server.table import FIRST_TABLE, Table
from raytrain_app.strategies.worker import NO_POOL, WorkerSpec

SIZES = {7_850: 2000, 101_770: 400, 1_200_000: 100, 25_000_000: 16}
"""Parameters, and rounds of one measurement: softmax regression and one hidden layer on MNIST, and two larger models."""
REPEATS = 3
ENDLESS_ROWS = 10**9
LR = 0.01


@dataclass
class Line:
    """One size with one number of workers; medians over `REPEATS`.

    Attributes:
        parameters: elements of the vector.
        workers: that ask at the same time.
        ours_s, plain_s: seconds a round of all workers together: wall time over rounds.
        call_s: seconds of a bare actor call.
        copy_s: seconds of one copy of the vector in memory.
    """

    parameters: int
    workers: int
    ours_s: float
    plain_s: float
    call_s: float
    copy_s: float

    def text(self) -> str:
        """The line for people; GB/s count the vector twice a round, once pushed and once pulled."""
        moved_gb, ours = 8 * self.parameters / 1e9, self.ours_s
        return (
            f"{self.parameters:>10,} parameters, {self.workers} worker{'s' if self.workers > 1 else ' '}: "
            f"{1 / ours:8,.0f} rounds/s {moved_gb / ours:6.2f} GB/s   plain server {1 / self.plain_s:6,.0f} rounds/s "
            f"{moved_gb / self.plain_s:5.2f} GB/s, x{self.plain_s / ours:<5.1f} actor call {1 / self.call_s:6,.0f} a second, "
            f"x{self.call_s / ours:<5.2f} memory copy {self.copy_gb_s:5.1f} GB/s, x{moved_gb / ours / self.copy_gb_s:.2f}"
        )

    @property
    def copy_gb_s(self) -> float:
        """Bandwidth of the copy."""
        return 4 * self.parameters / self.copy_s / 1e9


@dataclass
class Figures:
    """All lines of one run."""

    lines: list[Line] = field(default_factory=list)

    def find(self, parameters: int, workers: int) -> Line:
        return next(line for line in self.lines if (line.parameters, line.workers) == (parameters, workers))

    def targets(self) -> list[str]:
        """What must be reached, and whether it was."""
        small, smalls, large = self.find(7_850, 1), self.find(7_850, 2), self.find(25_000_000, 1)
        share = 8 * 25_000_000 / large.ours_s / 1e9 / large.copy_gb_s
        return [
            _target("25 M parameters, against the plain server", large.plain_s / large.ours_s, 4.0),
            _target("25 M parameters, against memory copy", share, 0.25),
            _target("7,850 parameters, against the bare actor call", small.call_s / small.ours_s, 0.9),
            _target("7,850 parameters, two workers, against the plain server", smalls.plain_s / smalls.ours_s, 1.5),
        ]


def _target(what: str, found: float, wanted: float) -> str:
    return f"{'reached' if found >= wanted else 'MISSED '}  {what}: {found:.2f} times (at least {wanted:g})"


class ZeroStart:
    """Begins a run with zeros; it has no validation and no end."""

    def __init__(self, coordinator: Actor, size: int) -> None:
        self._coordinator, self._size = coordinator, size

    def begin(self, servers: int) -> int:
        """See `Evaluator.begin`."""
        zeros, nothing = np.zeros(self._size, np.float32), np.zeros(0, np.int64)
        state = ShardState(0, self._size, zeros, {}, nothing, num_parameters=self._size)
        wait_for(self._coordinator.commit.remote(FIRST_TABLE, cut_anew([state], servers)))
        return servers

    def save(self) -> bool:
        """See `Evaluator.save`."""
        return True


class PlainServer:
    """What people write first: the whole model in one actor, gradients in, parameters out."""

    def __init__(self, size: int) -> None:
        self.parameters = np.zeros(size, np.float32)

    def push_and_pull(self, gradient: np.ndarray) -> np.ndarray:
        self.parameters -= LR * gradient
        return self.parameters

    def nothing(self) -> None:
        pass


class Rounds:
    """A worker that asks for rounds."""

    def __init__(self, size: int) -> None:
        self._gradient = torch.ones(size)
        self._client: Client | None = None

    def plain(self, server: Actor, count: int) -> None:
        gradient = self._gradient.numpy()
        for _ in range(count):
            wait_for(server.push_and_pull.remote(gradient))

    def calls(self, server: Actor, count: int) -> None:
        for _ in range(count):
            wait_for(server.nothing.remote())

    def ours(self, coordinator: Actor, count: int) -> None:
        if self._client is None:

            def where(known: Table | None) -> Table | None:
                table: Table | None = wait_for(coordinator.table.remote(known))
                return table

            self._client = Client(where, f"rounds-{id(self)}", Layout(len(self._gradient)))
        client, lease, done = self._client, -1, 0
        nothing = torch.zeros(0, dtype=torch.int64)
        while done < count:
            while lease < 0:
                lease = client.take()
            sent = client.new_push(lease, nothing)
            sent.vector.copy_(self._gradient)
            sent.lr, sent.rows = LR, 1
            lease, done = client.push(sent).lease, done + 1
            assert len(client.vector) == len(self._gradient)

    def leave(self) -> None:
        if self._client is not None:
            self._client.leave()


def measure(tell: Callable[[str], None], sizes: Sequence[int] = tuple(SIZES)) -> Figures:
    """Measures all sizes with one and two workers; Ray is up.

    Args:
        tell: told of progress.
        sizes: of `SIZES`.
    """
    figures = Figures()
    for size in sizes:
        tell(f"{size:,} parameters")
        figures.lines += _measure_size(size, SIZES[size])
    return figures


def _measure_size(size: int, rounds: int) -> list[Line]:
    job = {
        "name": "bench-ps",
        "task": "mnist",
        "model": {"name": "linear"},
        "optimizer": {"name": "sgd", "lr": LR},
        "scaling": {"workers": 2},
        "strategy": {"name": "parameter_server", "correction": "none"},
    }
    plain = start_here(PlainServer, size)
    coordinator = start_here(Coordinator, 1, 0, 30.0, options={"max_concurrency": 100})
    spec = WorkerSpec(job_from_dict(job).model_dump(mode="json"), ray.put([]), coordinator, None, tempfile.gettempdir(), NO_POOL)
    ours = ParameterServers(spec, ENDLESS_ROWS, start_here(ZeroStart, coordinator, size))
    workers = [start_here(Rounds, size) for _ in range(2)]
    lines = []
    for count in (1, 2):
        asking = workers[:count]
        kinds = {"ours": coordinator, "plain": plain, "calls": plain}
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for kind, server in kinds.items():
            _seconds(asking, kind, server, max(2, rounds // 4))
        for _ in range(REPEATS):
            for kind, server in kinds.items():
                found[kind].append(_seconds(asking, kind, server, rounds))
        medians = {kind: statistics.median(seconds) for kind, seconds in found.items()}
        lines.append(Line(size, count, medians["ours"], medians["plain"], medians["calls"], _copy_seconds(size)))
        wait_for([worker.leave.remote() for worker in workers])
    for actor in (*workers, plain):
        ray.kill(actor)
    ours.close()
    ray.kill(coordinator)
    return lines


def _seconds(workers: Sequence[Actor], kind: str, server: Actor, rounds: int) -> float:
    """Wall time over rounds while all workers ask at once."""
    started_s = time.perf_counter()
    wait_for([getattr(worker, kind).remote(server, rounds) for worker in workers])
    return (time.perf_counter() - started_s) / (rounds * len(workers))


def _copy_seconds(size: int) -> float:
    """Median of warmed copies of a vector; short ones several times over, since the clock has its own cost."""
    source = np.random.default_rng(0).random(size, np.float32)
    target, times = np.empty_like(source), max(1, 10_000_000 // size)
    found = []
    for _ in range(7):
        started_s = time.perf_counter()
        for _ in range(times):
            np.copyto(target, source)
        found.append((time.perf_counter() - started_s) / times)
    return statistics.median(found)
