"""What people train with today, as a script: DistributedDataParallel under torchrun, or a bare loop with one worker.

    torchrun --nproc-per-node 2 -m raytrain_app.bench.plain_torch '{"model": "cnn", ...}'

It takes as many steps as each line of its standard input says, and answers with the seconds a step.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from raytrain_app.bench.random_images import TASK


def main(config: dict[str, Any]) -> None:
    """Trains on demand.

    Args:
        config: `model`, `options`, `rows`, `batch` (of all workers together), `threads`, `lr`, `device`.
    """
    torch.set_num_threads(config["threads"])
    rank, world_size, device = join_group(config["device"])
    model: torch.nn.Module = TASK.torch_model(config["model"], TASK.models[config["model"]](**config["options"])).to(device)
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    x, y = (torch.from_numpy(values).to(device) for values in TASK.generate(str(config["rows"]))["train"])
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    mine = itertools.cycle(order.view(-1, world_size, config["batch"] // world_size)[:, rank].to(device))

    def step() -> None:
        ids = next(mine)
        loss = cross_entropy(model(TASK.torch_inputs(x[ids])), y[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    take_steps(step, rank, world_size, device)
    if world_size > 1:
        dist.destroy_process_group()


def join_group(device: str) -> tuple[int, int, torch.device]:
    """Rank, world size and device of this process; it joins the process group if `torchrun` started it."""
    if not dist.is_torchelastic_launched():
        return 0, 1, torch.device(device)
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    rank = dist.get_rank()
    return rank, dist.get_world_size(), torch.device("cpu") if device == "cpu" else torch.device(device, rank)


def take_steps(step: Callable[[], None], rank: int, world_size: int, device: torch.device) -> None:
    """Takes steps as they are asked for, and answers with the seconds that each took."""
    while (count := steps_asked(rank, world_size)) > 0:
        began_s = time.perf_counter()
        for _ in range(count):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if rank == 0:
            answer({"step": (time.perf_counter() - began_s) / count})


def steps_asked(rank: int, world_size: int) -> int:
    """The next number of steps, which rank 0 reads and tells the others; 0 at the end."""
    count = torch.tensor([int(sys.stdin.readline() or 0) if rank == 0 else 0])
    if world_size > 1:
        dist.broadcast(count, 0)
    return int(count)


def answer(seconds: Mapping[str, float]) -> None:
    """Tells what a step took."""
    sys.stdout.write(json.dumps(seconds) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
