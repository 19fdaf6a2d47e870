"""Bulk mode with one worker is plain training, bit for bit: the product's data path beside a loop of PyTorch's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from raytrain_app.bench.ps_corrections import Digits
from raytrain_app.elastic.plan import shard_seed
from raytrain_app.job import job_from_dict
from raytrain_app.learners.torch import TorchLearner
from raytrain_app.learners.torch_parts import seed_generators
from raytrain_app.strategies.parameter_server.policy import plan_of, policy_of
from raytrain_app.strategies.parameter_server.snapshot import first_states
from raytrain_app.tasks.mnist import TASK, Mlp
from tests.unit.parameter_server.making import farm

ROWS, BATCH = 2048, 64
"""Batches of a power of two: then the mean's gradient is the sum's, divided without rounding."""


@pytest.mark.parametrize(("momentum", "servers"), [(0.0, 1), (0.9, 1), (0.9, 3)])
def test_bulk_with_one_worker_is_plain_sgd(momentum: float, servers: int) -> None:
    torch.set_num_threads(1)
    raw: dict[str, Any] = {
        "name": "plain",
        "task": "mnist",
        "model": {"name": "mlp"},
        "train": {"epochs": 1, "global_batch_size": BATCH},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": momentum},
        "strategy": {"name": "parameter_server", "sync": "bulk"},
        "scaling": {"workers": 1},
    }
    job, digits = job_from_dict(raw), Digits.embedded()
    batches = np.random.default_rng(0).permutation(ROWS).reshape(-1, BATCH)
    learner = TorchLearner(job, TASK, torch.device("cpu"))
    policy, plan = policy_of(job, ROWS, learner.layout.num_parameters), plan_of(job, ROWS)
    with farm(plan, policy, learner.layout.size, servers) as made:
        for number, state in enumerate(first_states(learner, policy, servers)):
            made.install(number, state)
        client = made.client()
        lease = client.take()
        for ids in batches:
            while lease < 0:  # with several servers a step is done when the worker says so, in its next request
                lease = client.take()
            learner.load_flat(client.vector, client.counters)
            sent = client.new_push(lease, torch.zeros(0, dtype=torch.int64))
            sent.vector.copy_(learner.shard(digits.train_x[ids], digits.train_y[ids], lease).vector)
            sent.lr, sent.rows = job.optimizer.lr, BATCH
            lease = client.push(sent).lease
        learner.load_flat(made.whole(), client.counters)

    seed_generators(shard_seed([job.train.seed]), torch.device("cpu"))
    model = TASK.torch_model("mlp", Mlp(hidden=128, dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for ids in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(TASK.torch_inputs(torch.from_numpy(digits.train_x[ids]))), y_of(digits, ids)).backward()
        optimizer.step()
    plain = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    for name, weights in learner.weights().items():
        assert weights.tobytes() == plain[name].tobytes(), name


def y_of(digits: Digits, ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(digits.train_y[ids])
