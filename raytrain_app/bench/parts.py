"""What a step of a model in parts costs: a run of the product, and the plain script with the same cut."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from raytrain_app.bench.step import LR, WARM_UP, Contestant, ProductRun, Script
from raytrain_app.bench.watched import own_ray
from raytrain_app.job import Job, job_from_dict

OPTIONS = {"layers": 4, "width": 64, "heads": 4}


@dataclass(frozen=True)
class PartsSetting:
    """What both train: the task tiny_gpt, one replica.

    Attributes:
        fsdp, tensor: ways to cut the model, and so workers.
        batch: rows of the global batch.
        threads: intra-op threads of a process.
        device: "cpu" or "cuda".
        steps: that are taken at a time.
        rounds: how often each kind takes them.
    """

    fsdp: int
    tensor: int
    batch: int
    threads: int
    device: str
    steps: int
    rounds: int

    def job(self, storage: str) -> Job:
        """The job of the product's run."""
        gpus = {"GPU": 1} if self.device == "cuda" else {}
        return job_from_dict(
            {
                "name": "bench-step-parts",
                "task": "tiny_gpt",
                "model": {"name": "gpt", **OPTIONS},
                "data": {"validation_fraction": 0.0},
                "train": {"epochs": 1000, "global_batch_size": self.batch, "threads": self.threads},
                "optimizer": {"name": "adamw", "lr": LR},
                "strategy": {"name": "model_parallel", "fsdp": self.fsdp, "tensor": self.tensor},
                "scaling": {"workers": self.fsdp * self.tensor, "resources_per_worker": {"CPU": 1, **gpus}},
                "checkpoint": {"every_steps": 1_000_000, "monitor": "loss"},
                # Workers that stand still are not to be taken for dead.
                "failure": {"heartbeat_s": 3600.0},
                "storage": storage,
            }
        )

    def script(self) -> dict[str, Any]:
        """What the script is told."""
        ways = {"fsdp": self.fsdp, "tensor": self.tensor}
        return {
            "options": {**OPTIONS, "dropout": 0.0},
            "batch": self.batch,
            "threads": self.threads,
            "device": self.device,
            "lr": LR,
            **ways,
        }


def measure_parts(setting: PartsSetting, tell: Callable[[str], None]) -> Iterator[str]:
    """Measures both, interleaved, and yields lines for people. Ray must not be up."""
    workers = setting.fsdp * setting.tensor
    with tempfile.TemporaryDirectory() as storage, ExitStack() as stack:
        stack.enter_context(own_ray(4 * workers))
        contestants: dict[str, Contestant] = {}
        for kind in ("plain", "product"):
            tell(f"starting: {kind}")
            script = kind == "plain"
            module = "raytrain_app.bench.plain_parts"
            contestants[kind] = Script(module, workers, setting.script()) if script else ProductRun(setting.job(storage))
            stack.callback(contestants[kind].close)
            contestants[kind].take(WARM_UP)
        rounds = []
        for number in range(setting.rounds):
            tell(f"round {number + 1} of {setting.rounds}")
            rounds.append({kind: contestant.take(setting.steps)["step"] for kind, contestant in contestants.items()})
    plain, product = (statistics.median(one[kind] for one in rounds) for kind in ("plain", "product"))
    ratio = statistics.median(one["product"] / one["plain"] for one in rounds)
    yield f"tiny_gpt, fsdp {setting.fsdp}, tensor {setting.tensor}, global batch {setting.batch}, {setting.device}"
    yield f"  plain script  {plain * 1e3:9.3f} ms a step"
    yield f"  product       {product * 1e3:9.3f} ms a step   {ratio:.3f} of plain"
