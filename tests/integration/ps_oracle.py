"""A parameter server whose parameters are counters: every push adds one, so what they hold is how often pushes counted.

Coordinator, servers and clients are the product's own, each in a process of its own that can be killed. Workers push with
every irregularity there is: twice, late, in another order, and after they were given up.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from raytrain_app.actors import start_here, wait_for
from raytrain_app.bench.ps import ENDLESS_ROWS, ZeroStart
from raytrain_app.elastic.reduce import Layout
from raytrain_app.job import Job, job_from_dict
from raytrain_app.strategies.parameter_server.client import Client
from raytrain_app.strategies.parameter_server.coordinator import Coordinator
from raytrain_app.strategies.parameter_server.ledger import WAIT
from raytrain_app.strategies.parameter_server.outbox import Sent
from raytrain_app.strategies.parameter_server.services import ParameterServers
from raytrain_app.strategies.parameter_server.shard import ShardState
from raytrain_app.strategies.parameter_server.table import Table
from raytrain_app.strategies.parameter_server.window import Window
from raytrain_app.strategies.worker import NO_POOL, WorkerSpec

SIZE = 1000
BULK_PARTS = 4


def oracle_job(sync: str, servers: int, parts: int) -> Job:
    """A job whose servers add up what they get."""
    return job_from_dict(
        {
            "name": "oracle",
            "task": "mnist",
            "model": {"name": "linear"},
            "train": {"global_batch_size": 8, "virtual_shards": parts},
            "optimizer": {"name": "sgd", "lr": 1.0},
            "scaling": {"workers": f"1..{parts}"},
            "strategy": {"name": "parameter_server", "servers": servers, "sync": sync, "correction": "none"},
        }
    )


class Pusher:
    """A worker process. It pushes for as long as it lives, and writes down which leases were acknowledged.

    Args:
        coordinator: where the servers are known.
        folder: for the file of acknowledged leases.
        bulk: the run's mode.
        seed: of its irregularities.
        local: use shared memory.
    """

    def __init__(self, coordinator: Any, folder: str, bulk: bool, seed: int, local: bool) -> None:
        self._coordinator, self._bulk, self._local = coordinator, bulk, local
        self._rng = random.Random(f"{seed} {os.getpid()}")
        self._log = os.open(Path(folder, f"{uuid.uuid4().hex}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        # From the constructor, which is called again after each death: of a call that is retried Ray may lose track.
        threading.Thread(target=self._push_for_ever, daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def _push_for_ever(self) -> None:
        """Pushes ones."""
        name, parts = f"w-{uuid.uuid4().hex[:8]}", BULK_PARTS if self._bulk else 0
        client = Client(self._where, name, Layout(SIZE, 0, 0), parts=parts, local=self._local)
        late: list[int] = []
        lease = WAIT
        while True:
            while lease < 0:
                lease = client.take()
            chance = self._rng.random()
            if chance < 0.03:  # keeps it back, and is given up meanwhile
                late.append(lease)
                client.leave()
                lease = WAIT
                continue
            if chance < 0.06:
                time.sleep(self._rng.random() * 0.05)
            following = self._push(client, lease)
            if chance > 0.97:  # once more, though it was acknowledged
                following = self._push(client, lease)
            if late and chance > 0.9:  # what was kept back, after others and perhaps after another worker's
                following = self._push(client, late.pop(self._rng.randrange(len(late))))
            lease = following

    def _push(self, client: Client, lease: int) -> int:
        sent: Sent = client.new_push(lease, torch.zeros(0, dtype=torch.int64))
        sent.vector.fill_(1.0)
        sent.lr, sent.rows = -1.0, 1
        answer = client.push(sent)
        if not answer.refused:
            os.write(self._log, f"{lease}\n".encode())
        return answer.lease

    def _where(self, known: Table | None) -> Table | None:
        table: Table | None = wait_for(self._coordinator.table.remote(known))
        return table


@dataclass
class Oracle:
    """A running oracle.

    Attributes:
        folder: of the files of acknowledged leases.
        servers, workers: how many to start with.
        sync: the mode.
        seed: of everything random.
        kills: processes killed so far, by kind.
    """

    folder: Path
    servers: int = 2
    workers: int = 3
    sync: str = "async"
    seed: int = 0
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("server", "worker", "coordinator"), 0))

    def __enter__(self) -> Oracle:
        self._rng = random.Random(self.seed)
        parts = BULK_PARTS if self.sync == "bulk" else 8
        job = oracle_job(self.sync, self.servers, parts)
        self._coordinator = start_here(Coordinator, 1, 0, 30.0, options={"max_concurrency": 1000})
        spec = WorkerSpec(job.model_dump(mode="json"), ray.put([]), self._coordinator, None, str(self.folder), NO_POOL)
        zeros = start_here(ZeroStart, self._coordinator, SIZE)
        self.services = ParameterServers(spec, ENDLESS_ROWS, zeros)
        actor: Any = ray.remote(Pusher)
        self._pushers = [
            actor.options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote(
                self._coordinator, str(self.folder), self.sync == "bulk", self.seed + number, number % 2 == 0
            )
            for number in range(self.workers)
        ]
        self.wait_until_pushes(10)
        return self

    def __exit__(self, *_: object) -> None:
        for pusher in self._pushers:
            ray.kill(pusher)
        self.services.close()
        ray.kill(self._coordinator)

    def kill(self, kind: str) -> None:
        """Kills a process with SIGKILL, if there is one that lives."""
        pid = self._pid(kind)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self.kills[kind] += 1

    @contextmanager
    def stopped(self, kind: str) -> Iterator[None]:
        """Stops a process for the block."""
        pid = self._pid(kind)
        assert pid is not None, f"there is no {kind}"
        os.kill(pid, signal.SIGSTOP)
        yield
        os.kill(pid, signal.SIGCONT)

    def scale(self, servers: int) -> None:
        """Changes how many servers there are, and waits until it is done."""
        self.services.scale(servers)
        deadline_s = time.monotonic() + 120.0
        while len(self.status()) != servers or sum(server["stop"] - server["start"] for server in self.status()) != SIZE:
            assert time.monotonic() < deadline_s, f"not cut anew: {self.status()}"
            time.sleep(0.1)

    def _pid(self, kind: str) -> int | None:
        if kind == "coordinator":
            return int(wait_for(self._coordinator.__ray_call__.remote(_pid)))
        if kind == "worker":
            pushers = self._rng.sample(self._pushers, len(self._pushers))
            answered, _ = ray.wait([pusher.pid.remote() for pusher in pushers])  # those being started are not waited for
            return int(wait_for(answered[0]))
        alive = [server["pid"] for server in self.status() if _lives(server["pid"])]
        return self._rng.choice(alive) if alive else None

    def wait_until_pushes(self, more: int, timeout_s: float = 120.0) -> None:
        """Waits until so many more leases were acknowledged."""
        before, deadline_s = len(self.acknowledged()), time.monotonic() + timeout_s
        while len(self.acknowledged()) < before + more:
            assert time.monotonic() < deadline_s, f"no progress: {self.status()}"
            time.sleep(0.05)

    def acknowledged(self) -> set[int]:
        """Leases that some worker knows to have been applied."""
        lines = (line for path in self.folder.glob("*.log") for line in path.read_text().splitlines(keepends=True))
        return {int(line) for line in lines if line.endswith("\n")}

    def status(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = wait_for(self._coordinator.servers.remote())
        return found

    def settle(self) -> list[ShardState]:
        """Lets everything at work come to its end, and returns what the servers hold then."""
        servers = self.services._servers[: len(self.status())]
        states = self.services._handed_on(len(servers))
        wait_for([server.take_back.remote() for server in servers])
        wait_for(servers[0].drain.remote(False))
        return states

    def check(self) -> int:
        """Nothing lost, nothing doubled; returns how many pushes counted.

        What a worker and a server lost together is handed out again in its turn, so the run goes on until it has been.
        """
        acknowledged, deadline_s = self.acknowledged(), time.monotonic() + 120.0
        while True:
            states = self.settle()
            applied = Window.from_json(states[0].applied)
            assert all(Window.from_json(state.applied) == applied for state in states)
            whole = np.concatenate([state.vector for state in states])
            assert len(whole) == SIZE
            # In bulk mode a step adds the mean of its parts.
            expected = len(applied) / (BULK_PARTS if self.sync == "bulk" else 1)
            assert set(whole.tolist()) == {expected}, f"{set(whole.tolist())}, but {len(applied)} leases were applied"
            assert not applied.above, "everything that was handed out is done"
            lost = sorted(lease for lease in acknowledged if lease not in applied)
            if not lost:
                return len(applied)
            assert time.monotonic() < deadline_s, f"{len(lost)} acknowledged pushes are lost: {lost[:10]}"
            time.sleep(0.5)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _pid(actor: Any) -> int:
    return os.getpid()
