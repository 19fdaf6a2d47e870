"""What a job says about its parameter servers, as the values that servers and workers act on."""

from __future__ import annotations

from raytrain_app.elastic.progress import steps_per_epoch
from raytrain_app.job import Job
from raytrain_app.job.model import Adam, AdamW, Sgd
from raytrain_app.job.strategies import ParameterServer
from raytrain_app.strategies.parameter_server.correction import Correction
from raytrain_app.strategies.parameter_server.ledger import Plan
from raytrain_app.strategies.parameter_server.shard import Policy
from raytrain_app.strategies.parameter_server.update import Update

ADAGRAD_EPS = 1e-10
"""PyTorch's own default."""


def options(job: Job) -> ParameterServer:
    """The job's strategy, which is this one."""
    assert isinstance(job.strategy, ParameterServer), "a job with another strategy"
    return job.strategy


def plan_of(job: Job, num_rows: int) -> Plan:
    """The leases of a run over `num_rows` training rows."""
    chosen = options(job)
    parts = job.num_shards if chosen.sync == "bulk" else 1
    steps = steps_per_epoch(num_rows, job.train.global_batch_size)
    return Plan(steps, job.train.epochs, parts, chosen.sync, chosen.staleness)


def policy_of(job: Job, num_rows: int, num_parameters: int) -> Policy:
    """The rules by which servers change parameters.

    Args:
        job: what is trained.
        num_rows: training rows.
        num_parameters: leading elements of the flat vector that are parameters.
    """
    chosen, plan = options(job), plan_of(job, num_rows)
    return Policy(
        update=update_of(job),
        correction=Correction(chosen.correction),
        staleness=chosen.staleness,
        bulk=chosen.sync == "bulk",
        parts=plan.parts,
        steps_per_epoch=plan.steps_per_epoch,
        num_parameters=num_parameters,
    )


def update_of(job: Job) -> Update:
    """The servers' update rule: the job's optimizer, unless the strategy names another."""
    rule, name = job.optimizer, options(job).update
    if name == "auto" and isinstance(rule, Sgd):
        name = "momentum" if rule.momentum else "sgd"
    elif name == "auto":
        name = "adam"
    adam = rule if isinstance(rule, Adam | AdamW) else Adam()
    momentum = rule.momentum if isinstance(rule, Sgd) and rule.momentum else Update.momentum
    return Update(
        name=name,
        momentum=momentum,
        betas=adam.betas,
        eps=ADAGRAD_EPS if name == "adagrad" else adam.eps,
        weight_decay=rule.weight_decay,
        decoupled=name == "adam" and isinstance(rule, AdamW),
    )
