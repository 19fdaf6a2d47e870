"""Servers and clients in this process, over real sockets, without Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from raytrain_app.elastic.reduce import Layout
from raytrain_app.job import Job, job_from_dict
from raytrain_app.strategies.parameter_server.client import Client
from raytrain_app.strategies.parameter_server.desk import Desk
from raytrain_app.strategies.parameter_server.lead import Lead
from raytrain_app.strategies.parameter_server.ledger import Plan
from raytrain_app.strategies.parameter_server.outbox import Sent
from raytrain_app.strategies.parameter_server.serving import Serving
from raytrain_app.strategies.parameter_server.shard import Policy, Shard, ShardState, ranges
from raytrain_app.strategies.parameter_server.table import Place, Table

JOB: Job = job_from_dict({"name": "p", "task": "mnist", "model": {"name": "linear"}})
ONES = Policy(steps_per_epoch=10**6)
"""Rules under which a push of ones at a learning rate of -1 adds 1 to every parameter."""


def fail(error: Exception) -> None:
    raise error


@dataclass
class Farm:
    """Servers, which can be killed and restored.

    Attributes:
        plan: the run's leases.
        policy: the run's rules; the number of parameters is filled in.
        size: elements of the flat vector.
        servers: how many there are.
    """

    plan: Plan
    policy: Policy
    size: int
    servers: int = 1
    counters: int = 0
    number: int = 1
    desks: list[Desk] = field(default_factory=list)
    servings: list[Serving] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = dataclasses.replace(self.policy, num_parameters=self.size, steps_per_epoch=self.plan.steps_per_epoch)
        for number, (start, stop) in enumerate(ranges(self.size, self.servers)):
            slots = Shard.new_slots(self.policy, stop - start, torch.float32)
            zeros = np.zeros(stop - start, np.float32)
            counters = np.zeros(self.counters if number == 0 else 0, np.int64)
            self.desks.append(Desk())
            self.servings.append(Serving(self.desks[-1], "127.0.0.1", fail))
            self.install(number, ShardState(start, stop, zeros, slots, counters))

    def install(self, number: int, state: ShardState) -> None:
        lead = Lead(JOB, self.plan, state.ledger) if number == 0 else None
        if lead is not None:
            lead.expect(frozenset())  # else it would wait for the workers to speak up
        self.desks[number].install(self.number, self.policy, state, lead)

    def restart(self, number: int, state: ShardState) -> None:
        """Kills a server and brings another one in its place, which begins with an earlier state."""
        self.servings[number].close()
        self.desks[number].hand_on()
        self.desks[number] = Desk()
        self.servings[number] = Serving(self.desks[number], "127.0.0.1", fail)
        self.install(number, state)

    def where(self, known: Table | None) -> Table | None:
        """See `client.Source`."""
        places = tuple(
            Place(start, stop, serving.address)
            for serving, (start, stop) in zip(self.servings, ranges(self.size, self.servers), strict=True)
        )
        table = Table(self.number, places)
        return table if table != known else None

    def client(self, worker: str = "w", *, local: bool = True) -> Client:
        layout = Layout(self.size, 0, self.counters)
        return Client(self.where, worker, layout, parts=self.policy.parts if self.policy.bulk else 0, local=local)

    def whole(self) -> torch.Tensor:
        """The parameters on all servers."""
        return torch.cat([desk.shard.versions.current for desk in self.desks if desk.shard is not None])

    def close(self) -> None:
        for serving, desk in zip(self.servings, self.desks, strict=True):
            serving.close()
            desk.hand_on()


@contextmanager
def farm(
    plan: Plan | None = None, policy: Policy = ONES, size: int = 1000, servers: int = 1, counters: int = 0
) -> Iterator[Farm]:
    """Servers for the block."""
    made = Farm(plan or Plan(10**6, 1), policy, size, servers, counters)
    try:
        yield made
    finally:
        made.close()


def ones(client: Client, lease: int, value: float = 1.0) -> Sent:
    """A push that adds `value` to every parameter."""
    sent = client.new_push(lease, torch.zeros(client.layout.num_counters, dtype=torch.int64))
    sent.vector.fill_(value)
    sent.lr, sent.rows = -1.0, 1
    return sent
