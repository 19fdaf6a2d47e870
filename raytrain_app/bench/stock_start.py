"""Stock Ray Train as its documentation has it, on the job of `start`: rows from Parquet come through Ray Data."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def train_loop(config: dict[str, Any]) -> None:
    """Trains until the first step is done, and leaves the time of its end."""
    import numpy as np
    import ray.train
    import ray.train.torch
    import torch

    from raytrain_app.tasks.mnist import TASK

    model = ray.train.torch.prepare_model(TASK.torch_model("cnn", TASK.models["cnn"]()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    batches = ray.train.get_dataset_shard("train").iter_batches(batch_size=config["batch"], batch_format="numpy")
    for batch in batches:
        x = torch.from_numpy(np.stack(batch["image"]).reshape(-1, 28, 28).copy())
        loss = torch.nn.functional.cross_entropy(model(TASK.torch_inputs(x)), torch.from_numpy(batch["label"].copy()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        break
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["result"]).write_text(repr(time.time()))


def main(data: str, workers: int, batch: int, folder: str) -> None:
    """Trains on the rows of a Parquet file, and leaves the time of the first step in `folder`."""
    import ray
    from ray.train.v2.api.config import RunConfig, ScalingConfig
    from ray.train.v2.torch.torch_trainer import TorchTrainer

    # One CPU more than the workers take: without it Ray Data's tasks would wait for ever, and tell nobody.
    ray.init(log_to_driver=False, num_cpus=None if "RAY_ADDRESS" in os.environ else workers + 1)
    TorchTrainer(
        train_loop,
        train_loop_config={"batch": batch // workers, "result": f"{folder}/first"},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder),
        datasets={"train": ray.data.read_parquet(data).random_shuffle(seed=0)},
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
