"""Stock Ray Train as its documentation has it, with a checkpoint every so many steps."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def train_loop(config: dict[str, Any]) -> None:
    """Trains and leaves the times at which steps began."""
    import ray.train
    import ray.train.torch
    import torch

    from raytrain_app.bench.random_images import TASK

    torch.set_num_threads(1)
    model = ray.train.torch.prepare_model(TASK.torch_model(config["model"], TASK.models[config["model"]](**config["options"])))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    x, y = (torch.from_numpy(values) for values in TASK.generate(str(config["rows"]))["train"])
    leads, began = ray.train.get_context().get_world_rank() == 0, []
    for step in range(config["steps"]):
        began.append(time.time())
        loss = torch.nn.functional.cross_entropy(model(TASK.torch_inputs(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % config["every"] == 0:
            with tempfile.TemporaryDirectory() as folder:
                if leads:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, Path(folder, "state.pt"))
                ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder) if leads else None)
    if leads:
        Path(config["result"]).write_text(json.dumps(began))


def main(config: dict[str, Any], workers: int, folder: str) -> None:
    """Trains to the end."""
    import ray
    from ray.train.v2.api.config import RunConfig, ScalingConfig
    from ray.train.v2.torch.torch_trainer import TorchTrainer

    ray.init(log_to_driver=False)
    TorchTrainer(
        train_loop,
        train_loop_config={**config, "result": f"{folder}/began"},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder),
    ).fit()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
