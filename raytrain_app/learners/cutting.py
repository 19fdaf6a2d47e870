"""Cuts a PyTorch model over the workers of one replica: into stages, by tensors, and into fully sharded parts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from raytrain_app.errors import JobError
from raytrain_app.job import ModelParallel
from raytrain_app.task import Cut


def cut_model(
    model: nn.Module, cut: Cut, ways: ModelParallel, plan: Sequence[Sequence[str]], mesh: DeviceMesh
) -> list[nn.Module]:
    """Keeps a worker's part of a model, in place.

    Args:
        model: whole, and equal on all workers of the replica; afterwards its parameters, which keep their names, are those
            of this worker, and DTensors where they are cut.
        cut: how it can be cut.
        ways: into how many parts each way.
        plan: what `stage_plan` says.
        mesh: of the replica, with the dimensions "pipeline", "fsdp" and "tensor".

    Returns:
        This worker's stages, in their order: what goes through them one after the other, with those of the other workers
        between them. Without a pipeline it is the model itself.

    Raises:
        JobError: it cannot be cut like that.
    """
    problems = list(cut_problems(model, cut, ways))
    if problems:
        raise JobError("\n".join(problems))
    stages = [model]
    if ways.pipeline > 1:
        mine = plan[mesh.get_local_rank("pipeline") :: ways.pipeline]
        _keep(model, [name for names in mine for name in names])
        stages = [nn.Sequential(*map(model.get_submodule, names)) for names in mine]
    blocks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    units = [unit for block in blocks for unit in block if any(True for _ in unit.parameters())]
    if ways.activation_checkpointing:
        for unit in units:
            unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
    if ways.tensor > 1:
        styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name, _ in _matching(model, cut.columns)}
        styles |= {name: RowwiseParallel() for name, _ in _matching(model, cut.rows)}
        parallelize_module(model, mesh["tensor"], styles)
    if ways.fsdp > 1:
        for unit in [*units, *stages]:
            _shard_fully(unit, mesh["fsdp"])
    return stages


def cut_problems(model: nn.Module, cut: Cut, ways: ModelParallel) -> Iterator[str]:
    """Why a model cannot be cut, as sentences that name the key of the job."""
    statistics = [name for name, buffer in model.named_buffers() if name in model.state_dict()]
    if statistics:
        yield (
            f"strategy.name: found model_parallel, but the model has buffers such as {statistics[0]}, which every shard of a "
            "batch would change; expected a model without them (LayerNorm or GroupNorm instead of BatchNorm), or strategy: "
            "{name: allreduce}"
        )
    if ways.tensor > 1:
        columns, rows = dict(_matching(model, cut.columns)), dict(_matching(model, cut.rows))
        if not columns:
            yield f"strategy.tensor: found {ways.tensor}, but the task's torch_cut names no columns; expected 1, or fsdp instead"
        sizes = [layer.out_features for layer in columns.values()] + [layer.in_features for layer in rows.values()]
        odd = next((size for size in [cut.heads, *sizes] if size is not None and size % ways.tensor), None)
        if odd is not None:
            yield f"strategy.tensor: found {ways.tensor}; expected a divisor of {odd}, the heads or widths that it divides"
    if ways.pipeline > 1:
        chain = list(links(model, cut.chain))
        if len(chain) < ways.pipeline * ways.stages_per_worker:
            there = f"has a chain of {len(chain)} modules" if chain else "names no chain of modules"
            found = f"{ways.pipeline} x {ways.stages_per_worker}" if ways.stages_per_worker > 1 else str(ways.pipeline)
            yield f"strategy.pipeline: found {found}, but the task's torch_cut {there}; expected fewer, or fsdp instead"


def stages(chain: Sequence[str], costs: Sequence[int], count: int) -> list[list[str]]:
    """The links of a chain in consecutive stages whose costs are as equal as they can be.

    The costliest stage costs as little as possible (the linear partition problem, found by trying the sums of consecutive
    links).
    """
    limits = sorted({sum(costs[i:j]) for i in range(len(costs)) for j in range(i + 1, len(costs) + 1)})
    return next(found for limit in limits if (found := _packed(chain, costs, limit, count)) is not None)


def _packed(chain: Sequence[str], costs: Sequence[int], limit: int, count: int) -> list[list[str]] | None:
    """The links in `count` consecutive parts that cost up to `limit` each, none of them empty; None if there is no way."""
    parts: list[list[str]] = [[]]
    held = 0
    for place, (link, size) in enumerate(zip(chain, costs, strict=True)):
        must_open = len(chain) - place <= count - len(parts)
        if parts[-1] and (held + size > limit or must_open):
            parts.append([])
            held = 0
        parts[-1].append(link)
        held += size
        if held > limit or len(parts) > count:
            return None
    return parts if len(parts) == count else None


def links(model: nn.Module, chain: Sequence[str]) -> Iterator[str]:
    """Names of the modules of a chain, those of lists one by one."""
    for name in chain:
        module = model.get_submodule(name)
        if isinstance(module, nn.ModuleList):
            yield from (f"{name}.{number}" for number in range(len(module)))
        else:
            yield name


def divided(model: nn.Module, cut: Cut) -> set[str]:
    """Names of the parameters that `tensor` divides."""
    named = {f"{name}.weight" for name, _ in _matching(model, (*cut.columns, *cut.rows))}
    named |= {f"{name}.bias" for name, _ in _matching(model, cut.columns)}
    return named & {name for name, _ in model.named_parameters()}


def _matching(model: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that one of the patterns fits, by name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(fnmatchcase(name, pattern) for pattern in patterns):
            yield name, module


def _keep(model: nn.Module, names: Sequence[str]) -> None:
    """Empties all modules of a model but the named ones and what is in them or around them."""
    kept = {id(module) for name in names for module in model.get_submodule(name).modules()}
    around = {id(model.get_submodule(".".join(name.split(".")[:end]))) for name in names for end in range(name.count(".") + 1)}
    for name, module in list(model.named_modules()):
        if id(module) not in kept and id(module) not in around and any(True for _ in module.parameters()):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, nn.Identity())


def _shard_fully(unit: nn.Module, mesh: DeviceMesh) -> None:
    sharded: Any = fully_shard(unit, mesh=mesh)
    assert isinstance(sharded, FSDPModule)
    # Gradients are sums over the rows, which no number of workers may change.
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_gradient_divide_factor(1.0)
