"""The learner of a part: whatever the cut, its replica does what the whole model does, and its parts join to the whole state.

Four processes with real collectives go through all cuts, one after the other, as workers go through generations.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from raytrain_app.elastic.exchange import broadcast_bytes
from raytrain_app.elastic.group import Group, Rendezvous
from raytrain_app.elastic.roster import Generation
from raytrain_app.job import Job, job_from_dict
from raytrain_app.learners.footprint import footprint
from raytrain_app.learners.sharded import ShardedLearner
from raytrain_app.learners.torch import TorchLearner
from raytrain_app.learners.torch_parts import prepare_process
from raytrain_app.state import Arrays, TrainState
from raytrain_app.storage.parts import join_parts, pack_part
from raytrain_app.tasks.small_language import write
from raytrain_app.tasks.tiny_gpt import TASK

HOST, LIMIT_S, WORKERS = "127.0.0.1", 120.0, 4
pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
CUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": 2},
    "fsdp-4": {"fsdp": 4},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "microbatches": 3},
    "pipeline-4-gpipe": {"pipeline": 4, "microbatches": 4, "schedule": "gpipe"},
    "fsdp-tensor": {"fsdp": 2, "tensor": 2},
    "fsdp-pipeline": {"fsdp": 2, "pipeline": 2, "microbatches": 2},
    "tensor-pipeline": {"tensor": 2, "pipeline": 2, "microbatches": 2},
    "interleaved": {"pipeline": 2, "microbatches": 4, "schedule": "interleaved", "stages_per_worker": 2},
    "fsdp-interleaved": {"fsdp": 2, "pipeline": 2, "microbatches": 2, "schedule": "interleaved", "stages_per_worker": 2},
    "checkpointing": {"fsdp": 2, "pipeline": 2, "microbatches": 2, "activation_checkpointing": True},
    "bf16-fsdp": {"fsdp": 2},
    "bf16-fsdp-tensor": {"fsdp": 2, "tensor": 2},
    "bf16-pipeline": {"pipeline": 2, "microbatches": 2},
}
"""By name; with bf16 in it they compute in bfloat16."""


def make_job(name: str, strategy: dict[str, Any], workers: int) -> Job:
    """Few rows, and a norm that the first gradient exceeds."""
    return job_from_dict(
        {
            "name": name,
            "task": "tiny_gpt",
            "model": {"name": "gpt", "layers": 3, "width": 16, "heads": 2},
            "train": {"global_batch_size": 11, "clip_norm": 0.5, "precision": "bf16" if "bf16" in name else "fp32"},
            "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9},
            "strategy": strategy,
            "scaling": {"workers": workers},
        }
    )


def rows() -> tuple[np.ndarray, np.ndarray]:
    return write(11, 3)


def train_part(name: str, number: int, ports: list[int], generation: int) -> dict[str, Any] | None:
    """Two steps and an evaluation on a replica, from the view of one of its workers; None of those it has no use for."""
    ways = {"name": "model_parallel", **CUTS[name]}
    peers = make_job(name, ways, 4).replica_workers
    if number >= peers:
        return None
    job = make_job(name, ways, peers)
    strategy: Any = job.strategy
    parts = {"pipeline": strategy.pipeline, "fsdp": strategy.fsdp, "tensor": strategy.tensor}
    members = tuple(str(member) for member in range(peers))
    group = Group(Generation(generation, number, members, HOST, ports[0], -1, (), 0), LIMIT_S, CPU, parts)
    group.connect(LIMIT_S)
    try:
        learner = ShardedLearner(job, TASK, CPU)
        learner.connect(group.mesh, group.mates)
        x, y = rows()
        scores = []
        for step in range(2):
            shard = learner.shard(x, y, step)
            mean = shard.vector / len(y)
            known = group.share([learner.squared_norm(mean), *shard.scores.tolist()])
            learner.gradient_norm = float(known[:, 0].sum()) ** 0.5
            scores.append([learner.gradient_norm, *known[:, 1:].sum(0).tolist()])
            learner.apply(mean, shard.counters, 0.5)
        scores.append(group.share(learner.evaluate(x[:5], y[:5]).tolist()).sum(0).tolist())
        whole = gathered(learner, group)
        again = ShardedLearner(job, TASK, CPU)
        again.connect(group.mesh, group.mates)
        again.load_whole(state_of(whole))
        same = gathered(again, group)
        assert all(np.array_equal(same[key], whole[key]) for key in whole.keys() | same.keys())
        sizes = {name: sum(array.nbytes for array in arrays.values()) for name, arrays in sections(learner.state()).items()}
        return {"scores": scores, "state": whole, "weights": learner.weights(), "bytes": sizes}
    finally:
        group.close()


def gathered(learner: ShardedLearner, group: Group) -> Arrays:
    """The state of a replica, by way of the files of a checkpoint."""
    mine = pack_part(learner.tensors(), group.mates)
    parts = [broadcast_bytes(mine if rank == group.rank else None, rank) for rank in range(group.peers)]
    return join_parts({f"{place}.safetensors": part for place, part in enumerate(parts)})


def sections(state: TrainState) -> dict[str, Arrays]:
    return {"weights": state.weights, "optimizer": state.optimizer}


def state_of(arrays: Arrays) -> TrainState:
    def section(name: str) -> Arrays:
        return {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}

    return TrainState(section("weights"), {}, section("optimizer"))


def live(number: int, pipe: Connection) -> None:
    """What each process does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    prepare_process(make_job("process", {"name": "allreduce"}, 1))
    rendezvous = Rendezvous(HOST)
    pipe.send(rendezvous.port)
    ports = pipe.recv()
    for generation, name in enumerate(CUTS, start=1):
        pipe.send(train_part(name, number, ports, generation))
        pipe.recv()  # the next generation begins when this one is over for all


@pytest.fixture(scope="module")
def trained() -> dict[str, list[dict[str, Any]]]:
    """By cut, what each worker of the replica has."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(WORKERS):
        mine, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=live, args=(number, theirs), daemon=True))
        pipes.append(mine)
    try:
        for process in processes:
            process.start()
        ports = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(ports)
        found = {}
        for name in CUTS:
            assert all(pipe.poll(LIMIT_S) for pipe in pipes), name
            found[name] = [part for pipe in pipes if (part := pipe.recv()) is not None]
            for pipe in pipes:
                pipe.send("next")
        return found
    finally:
        for process in processes:
            process.kill()


def whole_model(name: str) -> dict[str, Any]:
    """The same steps of one process."""
    job = make_job(name, {"name": "allreduce"}, 1)
    prepare_process(job)
    learner = TorchLearner(job, TASK, CPU)
    x, y = rows()
    scores = []
    for step in range(2):
        shard = learner.shard(x, y, step)
        mean = shard.vector / len(y)
        scores.append([float(torch.linalg.vector_norm(mean.double())), *shard.scores.tolist()])
        learner.apply(mean, shard.counters, 0.5)
    scores.append(learner.evaluate(x[:5], y[:5]).tolist())
    return {"scores": scores, "state": learner.state()}


@pytest.mark.parametrize("name", CUTS)
def test_a_replica_in_parts_steps_as_the_whole_model(name: str, trained: dict[str, list[dict[str, Any]]]) -> None:
    expected, parts = whole_model(name), trained[name]
    rtol, atol = (1e-5, 1e-6) if "bf16" not in name else (0.05, 0.01)
    state = state_of(parts[0]["state"])
    for part in parts:
        for mine, other in zip(part["scores"], expected["scores"], strict=True):
            np.testing.assert_allclose(mine, other, rtol=rtol)
        assert all(np.array_equal(part["weights"][key], state.weights[key]) for key in state.weights)
    for mine, other in ((state.weights, expected["state"].weights), (state.optimizer, expected["state"].optimizer)):
        assert mine.keys() == other.keys()
        for key, array in other.items():
            np.testing.assert_allclose(mine[key], array, rtol=rtol, atol=atol, err_msg=key)


@pytest.mark.parametrize("name", CUTS)
def test_a_worker_has_what_check_says_it_has(name: str, trained: dict[str, list[dict[str, Any]]]) -> None:
    ways = {"name": "model_parallel", **CUTS[name]}
    job = make_job(name, ways, make_job(name, ways, 4).replica_workers)
    expected, parts = footprint(job, TASK), [part["bytes"] for part in trained[name]]
    assert {"weights": expected.parameters, "optimizer": expected.optimizer} in parts
    if name.startswith("fsdp") and len(parts) == CUTS[name]["fsdp"]:
        whole = sum(array.nbytes for array in state_of(trained[name][0]["state"]).weights.values())
        assert expected.parameters <= 1.1 * whole / len(parts)
