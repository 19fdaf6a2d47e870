"""A worker pool: one Ray Train run, in a thread of the driver."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

from raytrain_app.job import Job


class InPlaceBackend(Backend):
    """A backend that starts nothing, since workers connect by themselves, and makes Ray Train replace single workers."""

    has_replica_groups = True


class InPlaceTorchConfig(TorchConfig):
    """`TorchConfig` with the in-place backend."""

    @property
    def backend_cls(self) -> type[Backend]:
        return InPlaceBackend


class Pool:
    """Workers that are started together and replaced one by one.

    Args:
        number: of the pool in the run, from 0.
        size: workers.
        job: says what each worker takes and computes on.
        body: runs in each worker; called with `argument`.
    """

    def __init__(self, number: int, size: int, job: Job, body: Callable[[Any], None], argument: Any) -> None:
        self.number, self.size = number, size
        self.error: BaseException | None = None
        self._trainer = TorchTrainer(
            lambda config: body(config["argument"]),
            train_loop_config={"argument": argument},
            torch_config=InPlaceTorchConfig(),
            scaling_config=ScalingConfig(
                num_workers=size,
                use_gpu=job.scaling.resources_per_worker["GPU"] > 0,
                resources_per_worker={name: amount for name, amount in job.scaling.resources_per_worker.items() if amount},
            ),
            run_config=RunConfig(
                name=f"{job.name}-pool-{number}",
                storage_path=tempfile.mkdtemp(prefix="raytrain-"),
                failure_config=FailureConfig(max_failures=-1),
                worker_runtime_env={"env_vars": _environment(job)},
            ),
        )
        self._thread = threading.Thread(target=self._run, name=f"pool-{number}", daemon=True)
        self._thread.start()

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Whether all its workers have returned, or the pool failed, waiting up to `timeout_s`; then `error` says which."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self.error = error


def _environment(job: Job) -> dict[str, str]:
    """What must be set before a worker imports its numerical libraries."""
    variables = {
        "OMP_NUM_THREADS": str(job.train.threads),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    if job.train.portable:
        variables |= {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
    return variables
