"""Every mode learns the embedded digits with eight workers of which one is ten times slower.

Workers are simulated in virtual time, with the product's own ledger and servers' rules: the same schedule every time, and no
waiting. A worker computes at the parameters that it was given when it took its lease.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from raytrain_app.elastic.plan import shard_rows
from raytrain_app.job import Job, job_from_dict
from raytrain_app.learners.torch import TorchLearner
from raytrain_app.strategies.parameter_server.ledger import Ledger, Outcome
from raytrain_app.strategies.parameter_server.policy import plan_of, policy_of
from raytrain_app.strategies.parameter_server.shard import Push, Shard, Status
from raytrain_app.strategies.parameter_server.snapshot import first_states, load_into
from raytrain_app.tasks.mnist import TASK
from tests.unit.parameter_server.digits import Digits, embedded_digits

WORKERS, SLOWER, BATCH = 8, 10.0, 64


@dataclass
class Learned:
    """How a simulated run ended: accuracy on the test rows, virtual seconds, and what the modes promise."""

    accuracy: float
    time: float
    staleness: int
    refused: int


@pytest.fixture(scope="module")
def digits() -> Digits:
    torch.set_num_threads(1)
    return embedded_digits()


def make_job(epochs: int, optimizer: dict[str, Any], model: str = "linear", **strategy: Any) -> Job:
    return job_from_dict(
        {
            "name": "c",
            "task": "mnist",
            "model": {"name": model},
            "train": {"epochs": epochs, "global_batch_size": BATCH},
            "optimizer": optimizer,
            "scaling": {"workers": WORKERS},
            "strategy": {"name": "parameter_server", **strategy},
        }
    )


def train(job: Job, digits: Digits) -> Learned:
    """Trains in virtual time; a fast worker needs one second for a batch."""
    rng, rows = random.Random(0), len(digits.train_y)
    learner = TorchLearner(job, TASK, torch.device("cpu"))
    policy, plan = policy_of(job, rows, learner.layout.num_parameters), plan_of(job, rows)
    shard, ledger = Shard(policy, first_states(learner, policy, 1)[0]), Ledger(plan)
    orders = [np.random.default_rng(epoch).permutation(rows) for epoch in range(job.train.epochs)]
    idle, order, now, worst, refused = list(range(WORKERS)), itertools.count(), 0.0, 0, 0
    at_work: list[tuple[float, int, int, tuple[int, int, torch.Tensor]]] = []
    while True:
        ledger.scored = ledger.epochs_done
        for worker in list(idle):
            lease = ledger.take(str(worker), shard.version)
            if lease >= 0:
                idle.remove(worker)
                seconds = (SLOWER if worker == 0 else 1.0) / plan.parts * (1.0 + 0.05 * rng.random())
                held = lease, shard.version, shard.versions.current.clone()
                heapq.heappush(at_work, (now + seconds, next(order), worker, held))
        if not at_work:
            break
        now, _, worker, (lease, version, parameters) = heapq.heappop(at_work)
        idle.append(worker)
        step, part = divmod(lease, plan.parts)
        batch = orders[step // plan.steps_per_epoch][step % plan.steps_per_epoch * BATCH :][:BATCH]
        ids = batch[shard_rows(len(batch), plan.parts, part)]
        learner.load_flat(parameters, shard.counters)
        gradient = learner.shard(digits.train_x[ids], digits.train_y[ids], lease).vector.clone()
        push = Push(lease, gradient if policy.bulk else gradient / len(ids), shard.counters, version, job.optimizer.lr, len(ids))
        missed = shard.staleness(push)
        if shard.apply(push, parameters) is Status.REFUSED:
            refused += 1
            ledger.put_back(lease)
        else:
            worst = max(worst, missed)
            ledger.applied(lease, Outcome(str(worker), 0.0, 0, len(ids), [], 0.0, missed, [], now))
            ledger.confirm(lease)
    assert ledger.finished
    assert len(shard.applied) == plan.total
    load_into(learner, [shard.state()])
    _, correct = learner.evaluate(digits.test_x, digits.test_y).tolist()
    return Learned(correct / len(digits.test_y), now, worst, refused)


ADAM, SGD = {"name": "adam", "lr": 0.002}, {"name": "sgd", "lr": 0.1}
MOMENTUM = {"name": "sgd", "lr": 0.05, "momentum": 0.9}


@pytest.fixture(scope="module")
def synchronous(digits: Digits) -> Learned:
    """Four epochs of plain steps, at the pace of the slow worker."""
    return train(make_job(4, SGD, sync="bulk"), digits)


@pytest.mark.parametrize(("correction", "behind"), [("none", 0.02), ("staleness", 0.05), ("gap", 0.03), ("delay", 0.02)])
def test_asynchronous(correction: str, behind: float, digits: Digits, synchronous: Learned) -> None:
    learned = train(make_job(4, SGD, correction=correction), digits)
    assert learned.accuracy >= synchronous.accuracy - behind
    assert learned.time <= synchronous.time / 7
    assert learned.staleness >= 50, "the slow worker's gradients were taken"
    assert learned.refused == 0


def test_refusing_keeps_old_gradients_out(digits: Digits, synchronous: Learned) -> None:
    learned = train(make_job(4, SGD, staleness=8), digits)
    assert learned.accuracy >= synchronous.accuracy - 0.03
    assert learned.staleness <= 8
    assert learned.refused > 0


@pytest.mark.parametrize("staleness", [0, 4])
def test_bounded(staleness: int, digits: Digits, synchronous: Learned) -> None:
    learned = train(make_job(4, SGD, sync="bounded", staleness=staleness), digits)
    assert learned.accuracy >= synchronous.accuracy - 0.02
    assert learned.staleness == staleness
    assert learned.refused == 0


def test_the_default_learns_with_adam(digits: Digits) -> None:
    assert train(make_job(4, ADAM), digits).accuracy >= 0.85


def test_the_default_learns_where_uncorrected_gradients_get_stuck(digits: Digits) -> None:
    assert train(make_job(4, MOMENTUM, "mlp"), digits).accuracy >= 0.80
    assert train(make_job(2, MOMENTUM, "mlp", correction="none"), digits).accuracy <= 0.30


def test_the_default_reaches_95_percent_with_a_convolutional_network(digits: Digits) -> None:
    assert train(make_job(8, ADAM, "cnn"), digits).accuracy >= 0.95
