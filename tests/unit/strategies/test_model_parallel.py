"""A worker dies at the worst moments of a step of replicas in parts: the others end with the weights of a calm run.

Two replicas of two workers, as processes with real collectives; of the membership there is only a script: all four train
until one is lost, then the replica that is whole goes on.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raytrain_app.data import Dataset, Split
from raytrain_app.data.blocks import Blocks
from raytrain_app.elastic.exchange import PeerLost
from raytrain_app.elastic.group import Group, Rendezvous
from raytrain_app.elastic.mail import Signals
from raytrain_app.elastic.progress import Stopwatch
from raytrain_app.elastic.roster import Generation, WorkerInfo
from raytrain_app.job import job_from_dict
from raytrain_app.learners.torch_parts import prepare_process
from raytrain_app.strategies.model_parallel import ModelParallel
from raytrain_app.strategies.worker import Worker, build_part
from raytrain_app.tasks.small_language import write
from raytrain_app.tasks.tiny_gpt import TASK

HOST, FAULT_STEP, LIMIT_S = "127.0.0.1", 10, 120.0
pytestmark = pytest.mark.slow
Fault = Callable[[ModelParallel, int], None]


class ScriptedLink:
    """Of one worker: tells it the generations, and keeps what it records."""

    def __init__(self, number: int, port: int, ports: list[int], survivors: Any) -> None:
        self.info = WorkerInfo(f"{number}", number // 2, "node", os.getpid(), HOST, port, None, peers=2, place=number % 2)
        self.clock, self.signals, self.stopwatch = -1, Signals(), Stopwatch()
        self.group: Group | None = None
        self.records: list[dict[str, Any]] = []
        self.summary: dict[str, Any] | None = None
        self._number, self._ports, self._survivors, self._joins = number, ports, survivors, 0

    def join(self) -> Generation | None:
        self._joins += 1
        members = range(4) if self._joins == 1 else range(2)
        if self._number not in members:
            return None
        if self._joins > 1:
            self._survivors.wait(LIMIT_S)
        return Generation(self._joins, self._number, tuple(map(str, members)), HOST, self._ports[0], self.clock, (), 0)

    def record(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def event(self, kind: str, **details: Any) -> None:
        pass

    def with_unrecorded(self, progress: dict[str, Any]) -> dict[str, Any]:
        return progress

    def take_up(self, progress: dict[str, Any]) -> dict[str, Any]:
        return progress

    def done(self, summary: dict[str, Any]) -> None:
        self.summary = summary


def dies_in_a_shard(engine: ModelParallel, number: int) -> None:
    compute = engine.learner.shard

    def shard(x: np.ndarray, y: np.ndarray, seed: int, ready: Any) -> Any:
        if number == 3 and engine.progress.step == FAULT_STEP:
            os._exit(1)
        return compute(x, y, seed, ready)

    engine.learner.shard = shard  # type: ignore[method-assign,assignment]


def dies_before_the_last_message(engine: ModelParallel, number: int) -> None:
    commit = engine._commit

    def dying(total: Any, apply: Callable[[], None]) -> None:
        if number == 3 and engine.progress.step == FAULT_STEP:
            os._exit(1)
        commit(total, apply)

    engine._commit = dying  # type: ignore[method-assign]


def only_the_first_gets_the_last_message(engine: ModelParallel, number: int) -> None:
    """The step is applied by one worker of the replica that goes on; the other learns in the next generation that it counts."""
    share = Group.share

    def torn(group: Group, values: Any) -> torch.Tensor:
        shared = share(group, values)
        if group.generation.number == 1 and engine.progress.step == FAULT_STEP and number > 0:
            if number == 3:
                os._exit(1)
            raise PeerLost("lost at the last moment")
        return shared

    Group.share = torn  # type: ignore[assignment,method-assign]


CUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "microbatches": 2},
    "interleaved": {"pipeline": 2, "microbatches": 2, "schedule": "interleaved", "stages_per_worker": 2},
}
FAULTS = (dies_in_a_shard, dies_before_the_last_message, only_the_first_gets_the_last_message)


def train(number: int, pipe: Connection, survivors: Any, folder: str, cut: str, fault: Fault | None) -> None:
    """What each process does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    job = job_from_dict(
        {
            "name": "parts",
            "task": "tiny_gpt",
            "model": {"name": "gpt", "layers": 2, "width": 16, "heads": 2, "dropout": 0.2},
            "train": {"epochs": 2, "global_batch_size": 20, "virtual_shards": 2, "clip_norm": 1.0},
            "strategy": {"name": "model_parallel", **CUTS[cut]},
            "scaling": {"workers": 4},
            "storage": folder,
        }
    )
    prepare_process(job)
    rendezvous = Rendezvous(HOST)
    pipe.send(rendezvous.port)
    x, y = write(350, 1)
    blocks = Blocks((), (0, len(y)), x.shape[1:], "uint8")
    dataset = Dataset(Split(blocks, np.arange(300)), Split(blocks, np.arange(300, 350)), None, (), "")
    link: Any = ScriptedLink(number, rendezvous.port, pipe.recv(), survivors)
    part = build_part(job, TASK, torch.device("cpu"))
    worker = Worker(job, TASK, part, dataset, link, rendezvous, torch.device("cpu"), folder, None)
    engine = ModelParallel(worker)
    engine._batches.reader = lambda split: RowsInMemory(x, y)  # type: ignore[assignment,method-assign,return-value]
    if fault is not None:
        fault(engine, number)
    engine.run()
    pipe.send((link.summary, [record["step"] for record in link.records]))


class RowsInMemory:
    """Instead of a `Reader` of Ray's object store."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self._x, self._y = x, y

    def rows(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._x[ids], self._y[ids]

    def prefetch(self, ids: np.ndarray) -> None:
        pass


def run(folder: Path, cut: str, fault: Fault | None) -> list[tuple[dict[str, Any] | None, list[int]]]:
    """Trains in four processes, and returns summary and recorded steps of the first two."""
    spawn = multiprocessing.get_context("spawn")
    survivors, pipes, processes = spawn.Barrier(2), [], []
    for number in range(4):
        mine, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=train, args=(number, theirs, survivors, str(folder), cut, fault), daemon=True))
        pipes.append(mine)
    try:
        for process in processes:
            process.start()
        ports = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(ports)
        assert all(pipe.poll(LIMIT_S) for pipe in pipes[:2]), "the run does not end"
        return [pipe.recv() for pipe in pipes[:2]]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("cut", CUTS)
def test_the_result_is_that_of_a_calm_run(cut: str, tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", cut, None)
    assert calm[0][0] is not None
    assert calm[0] == calm[1]
    for fault in FAULTS:
        assert run(tmp_path / fault.__name__, cut, fault) == calm, fault.__name__
