"""What a cut model takes of each worker's memory, told without making it: on torch's meta device nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from raytrain_app.job import Job, ModelParallel
from raytrain_app.learners.costs import meta_inputs, meta_model, stage_plan
from raytrain_app.learners.cutting import cut_problems, divided, links
from raytrain_app.task import Task


@dataclass(frozen=True)
class Footprint:
    """Bytes that the worker with the largest part needs.

    Attributes:
        parameters: its part of the model; its gradients take as much again.
        optimizer: the optimizer's state, after the first step.
        activations: what is kept from the forward passes for the backward passes. Under `tensor` this is the most that it may
            be, as not all of it is divided.
    """

    parameters: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return 2 * self.parameters + self.optimizer + self.activations


def cutting_problems(job: Job, task: Task) -> list[str]:
    """Why the job's model cannot be cut as its strategy says, as sentences that name the key."""
    ways, (model, options) = cast(ModelParallel, job.strategy), meta_model(job, task)
    problems = list(cut_problems(model, task.torch_cut(job.model.name, options), ways))
    if not problems and ways.balance == "flops":
        try:
            stage_plan(job, task)
        except Exception as error:  # of the task's own code
            what = " ".join(f"{type(error).__name__}: {error}".split())
            problems.append(
                f"strategy.balance: found flops, but none can be counted without values ({what}); expected parameters"
            )
    return problems


def footprint(job: Job, task: Task) -> Footprint:
    """The memory that a job's cut takes, of a model that can be cut like that.

    Raises:
        Exception: whatever the task's own code raises if it does not bear tensors without values.
    """
    ways, (model, options) = cast(ModelParallel, job.strategy), meta_model(job, task)
    cut = task.torch_cut(job.model.name, options)
    parallel = divided(model, cut) if ways.tensor > 1 else set()
    shard_rows = -(-job.train.global_batch_size // job.num_shards)
    hidden = meta_inputs(task, -(-shard_rows // (ways.fsdp * ways.microbatches)))
    parameters, activations = [0] * ways.pipeline, [0] * ways.pipeline
    whole = list(links(model, cut.chain)) if ways.activation_checkpointing else []
    for stage, names in enumerate(stage_plan(job, task) or [whole or [""]]):
        worker = stage % ways.pipeline
        for name in names:
            for inner, parameter in model.get_submodule(name).named_parameters(prefix=name):
                first = parameter.shape[0] if parameter.dim() else 1
                size = -(-first // ways.fsdp) * (parameter[:1].numel() if parameter.dim() else 1) * parameter.element_size()
                parameters[worker] += size // (ways.tensor if inner in parallel else 1)
        kept, hidden = _kept(model, names, hidden, ways.activation_checkpointing)
        activations[worker] = max(activations[worker], kept * _under_way(ways, worker))
    needs = (Footprint(p, _slots(job) * p, kept) for p, kept in zip(parameters, activations, strict=True))
    return max(needs, key=lambda need: need.total)


def _under_way(ways: ModelParallel, worker: int) -> int:
    """Microbatches of a stage of a worker, or of all of its stages, that wait for their backward pass at most."""
    if ways.schedule == "gpipe":
        return ways.microbatches
    behind = ways.pipeline - 1 - worker
    if ways.schedule == "1f1b":
        return min(ways.microbatches, behind + 1)
    a_turn = ways.microbatches // max(1, ways.microbatches // ways.pipeline)
    first = (ways.stages_per_worker - 1) * a_turn + 2 * behind  # Narayanan et al. 2021, section 2.2
    return min(ways.microbatches * ways.stages_per_worker, first + 1)


def _slots(job: Job) -> int:
    """Values that the optimizer keeps for each parameter."""
    if job.optimizer.name == "sgd":
        return 1 if job.optimizer.momentum else 0
    return 2


def _kept(model: nn.Module, names: list[str], hidden: torch.Tensor, inputs_alone: bool) -> tuple[int, torch.Tensor]:
    """Bytes that autograd keeps of the modules' forward passes, one after the other, and what the last one puts out."""
    owned = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    total = 0
    for name in names:
        module = model.get_submodule(name)
        if inputs_alone and "." in name:  # a member of a list, which is computed again
            total += hidden.untyped_storage().nbytes()
            hidden = module(hidden)
            continue
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = module(hidden)
    return total + sum(kept.values()), hidden
