"""What a PyTorch model computes, counted without computing it: on torch's meta device tensors have shapes and no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from raytrain_app.job import Job, ModelParallel
from raytrain_app.learners.cutting import links, stages
from raytrain_app.task import Task


def meta_model(job: Job, task: Task) -> tuple[nn.Module, Any]:
    """The job's model without values, and its options."""
    options = task.models[job.model.name](**job.model.options)
    with torch.device("meta"):
        return task.torch_model(job.model.name, options), options


def meta_inputs(task: Task, rows: int) -> torch.Tensor:
    """What a model of the task takes for so many rows, without values."""
    return task.torch_inputs(torch.zeros((rows, *task.columns.shape), dtype=getattr(torch, task.columns.dtype), device="meta"))


def row_flops(job: Job, task: Task) -> int:
    """Floating-point operations of a training step for each of its rows: a backward pass takes twice a forward pass.

    What activation checkpointing computes again does not count (Chowdhery et al., PaLM, 2022, appendix B).
    """
    model, _ = meta_model(job, task)
    return 3 * _flops(model, meta_inputs(task, 1))[0]


def stage_plan(job: Job, task: Task) -> list[list[str]]:
    """Names of the modules of each stage of a job's pipeline, the same for all who ask; without a pipeline there are none.

    Stage s is that of worker s modulo `strategy.pipeline`.
    """
    ways, (model, options) = cast(ModelParallel, job.strategy), meta_model(job, task)
    if ways.pipeline == 1:
        return []
    chain = list(links(model, task.torch_cut(job.model.name, options).chain))
    if ways.balance == "flops":
        costs = _link_flops(model, chain, meta_inputs(task, 1))
    else:
        costs = [sum(p.numel() for p in model.get_submodule(name).parameters()) for name in chain]
    return stages(chain, costs, ways.pipeline * ways.stages_per_worker)


def _link_flops(model: nn.Module, chain: Sequence[str], hidden: torch.Tensor) -> list[int]:
    costs = []
    for name in chain:
        cost, hidden = _flops(model.get_submodule(name), hidden)
        costs.append(cost)
    return costs


def _flops(module: nn.Module, inputs: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Of a forward pass, and what it puts out."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        outputs = module(inputs)
    return counter.get_total_flops(), outputs
