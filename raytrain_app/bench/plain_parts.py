"""What people train models in parts with today, as a script: FSDP2 and tensor parallelism under torchrun.

    torchrun --nproc-per-node 2 -m raytrain_app.bench.plain_parts '{"fsdp": 2, "tensor": 1, ...}'

It takes as many steps as each line of its standard input says, and answers with the seconds a step.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from raytrain_app.bench.plain_torch import join_group, take_steps
from raytrain_app.tasks.small_language import CHARACTERS, write
from raytrain_app.tasks.tiny_gpt import TASK, TRAIN_ROWS, Decoder, Gpt


def main(config: dict[str, Any]) -> None:
    """Trains on demand.

    Args:
        config: `options` of the model, `fsdp`, `tensor`, `batch` (of all workers together), `threads`, `lr`, `device`.
    """
    torch.set_num_threads(config["threads"])
    rank, world_size, device = join_group(config["device"])
    mesh = init_device_mesh(device.type, (config["fsdp"], config["tensor"]), mesh_dim_names=("fsdp", "tensor"))
    model = Decoder(Gpt(**config["options"]), len(CHARACTERS)).to(device)
    for block in model.blocks:
        if config["tensor"] > 1:
            names = ("attention.query", "attention.key", "attention.value", "gate", "up")  # in the same order everywhere
            plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in names}
            plan |= {"attention.out": RowwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
        if config["fsdp"] > 1:
            fully_shard(block, mesh=mesh["fsdp"])
    if config["fsdp"] > 1:
        fully_shard(model, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    x = torch.from_numpy(write(TRAIN_ROWS, 1)[0]).to(device)
    generator = torch.Generator().manual_seed(0)
    share = config["batch"] // config["fsdp"]
    first = mesh.get_local_rank("fsdp") * share

    def step() -> None:
        rows = x[torch.randint(len(x), (config["batch"],), generator=generator)[first : first + share]]
        loss = TASK.torch_loss(model(TASK.torch_inputs(rows)), TASK.torch_targets(rows, rows)) / share
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    take_steps(step, rank, world_size, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
