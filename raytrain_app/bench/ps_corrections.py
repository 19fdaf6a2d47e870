"""Which mode and correction learn when one of eight workers is ten times slower: the measurement behind the default.

Workers are simulated in virtual time, with the product's own ledger and servers' rules: the same schedule every time, and no
waiting. A worker computes at the parameters that it was given when it took its lease.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import ray
import torch

from raytrain_app.actors import wait_for
from raytrain_app.elastic.plan import learning_rate, training_rows
from raytrain_app.job import Job, job_from_dict
from raytrain_app.learners.torch import TorchLearner
from raytrain_app.strategies.parameter_server.ledger import Ledger, Outcome
from raytrain_app.strategies.parameter_server.policy import options, plan_of, policy_of
from raytrain_app.strategies.parameter_server.shard import Push, Shard, Status
from raytrain_app.strategies.parameter_server.snapshot import first_states, load_into
from raytrain_app.tasks.mnist import TASK

WORKERS, SLOWER, BATCH, EPOCHS, SEEDS = 8, 10, 64, 4, (0, 1)
MODELS = ("linear", "mlp", "cnn")
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "Adam 0.002": {"name": "adam", "lr": 0.002},
    "SGD 0.1": {"name": "sgd", "lr": 0.1},
    "momentum 0.05": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
}
MODES: Mapping[str, Mapping[str, Any]] = {
    "bulk": {"sync": "bulk"},
    "bounded 4": {"sync": "bounded", "staleness": 4, "correction": "none"},
    "none": {"correction": "none"},
    "staleness": {"correction": "staleness"},
    "gap": {"correction": "gap"},
    "delay": {"correction": "delay"},
}
"""The first one waits for the slow worker in every step, and is what the others are measured by; the last four are async."""


@dataclass(frozen=True)
class Digits:
    """The digits that come with the package: x uint8 (rows, 28, 28) and y int64 (rows,) of both splits."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @classmethod
    def embedded(cls) -> Digits:
        """All 10,000 of them."""
        table = pq.read_table(str(files("raytrain_app.data") / "embedded" / "mnist-10k.parquet"))
        x = np.array(table["image"].to_pylist(), np.uint8).reshape(-1, 28, 28)
        y = table["label"].to_numpy().astype(np.int64)
        train = np.array(table["split"].to_pylist()) == "train"
        return cls(x[train], y[train], x[~train], y[~train])


@dataclass(frozen=True)
class Learned:
    """How a simulated run ended.

    Attributes:
        accuracy: on the test rows.
        time: virtual, in units of a fast worker's batch.
        staleness: updates that the oldest gradient that was taken had missed.
        refused: gradients that were too old.
    """

    accuracy: float
    time: float
    staleness: int
    refused: int


def make_job(model: str, optimizer: Mapping[str, Any], epochs: int = EPOCHS, seed: int = 0, **strategy: Any) -> Job:
    """A job for eight workers."""
    return job_from_dict(
        {
            "name": "bench-ps",
            "task": "mnist",
            "model": {"name": model},
            "train": {"epochs": epochs, "global_batch_size": BATCH, "seed": seed},
            "optimizer": dict(optimizer),
            "scaling": {"workers": WORKERS},
            "strategy": {"name": "parameter_server", **strategy},
        }
    )


def simulate(job: Job, digits: Digits) -> Learned:
    """Trains in virtual time; worker 0 is the slow one."""
    torch.set_num_threads(1)
    rng, rows = random.Random(job.train.seed), len(digits.train_y)
    learner = TorchLearner(job, TASK, torch.device("cpu"))
    policy, plan = policy_of(job, rows, learner.layout.num_parameters), plan_of(job, rows)
    shard, ledger = Shard(policy, first_states(learner, policy, 1)[0]), Ledger(plan)
    orders = [np.random.default_rng([job.train.seed, epoch]).permutation(rows) for epoch in range(job.train.epochs)]
    idle, order, now, worst, refused = list(range(WORKERS)), itertools.count(), 0.0, 0, 0
    at_work: list[tuple[float, int, int, tuple[int, int, torch.Tensor]]] = []
    while True:
        ledger.scored = ledger.epochs_done
        for worker in list(idle):
            lease = ledger.take(str(worker), shard.version)
            if lease >= 0:
                idle.remove(worker)
                pace = (SLOWER if worker == 0 else 1.0) / plan.parts * (1.0 + 0.05 * rng.random())
                held = lease, shard.version, shard.versions.current.clone()
                heapq.heappush(at_work, (now + pace, next(order), worker, held))
        if not at_work:
            break
        now, _, worker, (lease, version, parameters) = heapq.heappop(at_work)
        idle.append(worker)
        step, part = divmod(lease, plan.parts)
        batch = orders[step // plan.steps_per_epoch][step % plan.steps_per_epoch * BATCH :][:BATCH]
        ids = batch[training_rows(len(batch), plan.parts, part)]
        learner.load_flat(parameters, shard.counters)
        gradient = learner.shard(digits.train_x[ids], digits.train_y[ids], lease).vector.clone()
        gradient = gradient if policy.bulk else gradient / len(ids)
        rate = learning_rate(job.optimizer.schedule, job.optimizer.lr, step, plan.total, job.optimizer.warmup_steps)
        push = Push(lease, gradient, shard.counters, version, rate, len(ids))
        missed = shard.staleness(push)
        if shard.apply(push, parameters) is Status.REFUSED:
            refused += 1
            ledger.put_back(lease)
        else:
            worst = max(worst, missed)
            ledger.applied(lease, Outcome(str(worker), 0.0, 0, len(ids), [], 0.0, missed, [], now))
            ledger.confirm(lease)
    assert ledger.finished, "nobody is at work, and nothing is left to do"
    load_into(learner, [shard.state()])
    correct = learner.evaluate(digits.test_x, digits.test_y)[1].item()
    return Learned(correct / len(digits.test_y), now, worst, refused)


@dataclass(frozen=True)
class Comparison:
    """Mean accuracy over `SEEDS` by (model, optimizer) and mode, and the virtual time of each mode in parts of bulk's."""

    accuracy: Mapping[tuple[str, str], Mapping[str, float]]
    time: Mapping[str, float]

    def shortfall(self, mode: str) -> float:
        """How far a mode is behind bulk where it is furthest behind."""
        return max(found["bulk"] - found[mode] for found in self.accuracy.values())

    @property
    def best(self) -> str:
        """The asynchronous correction that is least behind at its worst."""
        return min((mode for mode in MODES if "sync" not in MODES[mode]), key=self.shortfall)

    def lines(self) -> list[str]:
        """The table, with what the default is and what it should be."""
        lines = [
            f"test accuracy after {EPOCHS} epochs of mnist-sample; {WORKERS} workers, one of them {SLOWER} times slower",
            f"{'':22}" + "".join(f"{mode:>11}" for mode in MODES),
        ]
        for (model, optimizer), found in self.accuracy.items():
            lines.append(f"{model:7}{optimizer:15}" + "".join(f"{found[mode]:11.3f}" for mode in MODES))
        lines.append(f"{'furthest behind bulk':22}" + "".join(f"{self.shortfall(mode):11.3f}" for mode in MODES))
        lines.append(f"{'time, of bulk':22}" + "".join(f"{self.time[mode]:11.2f}" for mode in MODES))
        default = options(make_job("linear", OPTIMIZERS["SGD 0.1"])).correction
        return [*lines, f"least behind: {self.best}; the default is {default}"]


def compare(tell: Callable[[str], None]) -> Comparison:
    """Trains every model with every optimizer in every mode; Ray is up.

    Args:
        tell: told of progress.
    """
    digits = ray.put(Digits.embedded())
    task: Any = ray.remote(_simulate).options(num_cpus=1)
    cases = list(itertools.product(itertools.product(MODELS, OPTIMIZERS), MODES))
    running = {case: [task.remote(*case[0], case[1], seed, digits) for seed in SEEDS] for case in cases}
    found: dict[tuple[tuple[str, str], str], list[Learned]] = {}
    for case, references in running.items():
        found[case] = wait_for(references)
        tell(f"{' '.join(case[0])}, {case[1]}: {', '.join(f'{learned.accuracy:.3f}' for learned in found[case])}")
    wheres = list(itertools.product(MODELS, OPTIMIZERS))
    accuracy = {
        where: {mode: statistics.mean(learned.accuracy for learned in found[where, mode]) for mode in MODES} for where in wheres
    }
    time = {
        mode: statistics.mean(found[where, mode][0].time / found[where, "bulk"][0].time for where in wheres) for mode in MODES
    }
    return Comparison(accuracy, time)


def _simulate(model: str, optimizer: str, mode: str, seed: int, digits: Digits) -> Learned:
    return simulate(make_job(model, OPTIMIZERS[optimizer], seed=seed, **MODES[mode]), digits)
