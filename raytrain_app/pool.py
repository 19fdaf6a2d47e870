"""A worker pool: one Ray Train run on one node, in a thread of the driver."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import ray
from ray.train import Result
from ray.train.backend import Backend
from ray.train.torch import TorchConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.tensorflow.tensorflow_trainer import TensorflowTrainer
from ray.train.v2.torch.torch_trainer import TorchTrainer
from ray.util import get_placement_group, placement_group_table, remove_placement_group

from raytrain_app.actors import Actor, start_here, wait_for
from raytrain_app.cluster.sharing import Holdings, prefix
from raytrain_app.job import Job
from raytrain_app.pool_controller import GroupTensorflowConfig, InPlaceBackend, InPlaceConfig, InPlaceController, PoolSize


class InPlaceTorchConfig(TorchConfig):
    """`TorchConfig` with the in-place backend: it also gives each worker its GPU."""

    @property
    def backend_cls(self) -> type[Backend]:
        return InPlaceBackend


class Abortable(DataParallelTrainer):
    """A trainer that can be ended from outside.

    Ray Train's own run waits without limit for the node of a lost worker, and has no call to end it: so the handle of its
    controller is kept here. Its workers belong to the controller and end with it.
    """

    controller: Actor | None = None
    aborted = False

    def __init__(self, train_loop_per_worker: Callable[[], Any], **arguments: Any) -> None:
        # The constructors between want their own backends' options, and import TensorFlow, for which the driver has no use.
        DataParallelTrainer.__init__(self, train_loop_per_worker, **arguments)

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        # `Pool` does what the cleaner does, an actor that asks the dashboard, which is not always there, and else never ends.
        # The actor that hands out data sets has none to hand out.
        without = (PlacementGroupCleanerCallback, DatasetsCallback)
        arguments["callbacks"] = [c for c in arguments["callbacks"] if not isinstance(c, without)]
        arguments["scaling_policy"] = PoolSize(cast(ScalingConfig, self.scaling_config))
        if self.controller is None:
            self.controller = start_controller()
        if self.aborted:  # while it was starting
            ray.kill(self.controller)
        wait_for(self.controller.take.remote(arguments))
        wait_for(self.controller.run.remote())
        result: Result = wait_for(self.controller.get_result.remote())
        return result

    def abort(self) -> None:
        """Ends the run and its workers at once."""
        self.aborted = True
        if self.controller is not None:
            ray.kill(self.controller)


def start_controller() -> Actor:
    """Starts the controller of a pool to come, on this node."""
    environment = {"env_vars": get_env_vars_to_propagate()}
    return start_here(InPlaceController, options={"max_restarts": 0, "max_task_retries": 0, "runtime_env": environment})


class AbortableTorchTrainer(Abortable, TorchTrainer):
    """For PyTorch."""


class AbortableTensorflowTrainer(Abortable, TensorflowTrainer):
    """For TensorFlow."""


class Pool:
    """Workers that are started together and replaced one by one; or, under tf.distribute, end together when one is lost.

    Args:
        number: of the pool in the run, from 0.
        size: workers.
        node_id: the one node where they run; None is any nodes.
        job: says what each worker takes and computes on.
        body: runs in each worker, called with `argument`.
        controller: one of `start_controller` that is at hand.
    """

    def __init__(
        self,
        number: int,
        size: int,
        node_id: str | None,
        job: Job,
        body: Callable[[Any], None],
        argument: Any,
        controller: Actor | None = None,
    ) -> None:
        self.number, self.size, self.node_id = number, size, node_id
        self.error: BaseException | None = None
        self._folder = tempfile.mkdtemp(prefix=prefix())  # Ray Train wants one; nothing that lasts goes there
        self._trainer = _trainer(
            job,
            # As the loop's configuration the argument would be unpacked by the controller too, which would load PyTorch for it.
            lambda: body(argument),
            scaling_config=ScalingConfig(
                num_workers=size,
                use_gpu=job.scaling.resources_per_worker["GPU"] > 0,
                resources_per_worker={name: amount for name, amount in job.scaling.resources_per_worker.items() if amount},
                label_selector={"ray.io/node-id": node_id} if node_id is not None else None,
            ),
            run_config=RunConfig(
                name=f"{job.name}-pool-{number}",
                storage_path=self._folder,
                failure_config=FailureConfig(max_failures=0 if job.uses_tf_distribute else -1),
                worker_runtime_env={"env_vars": environment(job)},
            ),
        )
        self._trainer.controller = controller
        self._thread = threading.Thread(target=self._run, name=f"pool-{number}", daemon=True)
        self._thread.start()

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Whether all its workers have returned or the pool failed, which `error` tells; waits up to `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def has_place(self, holdings: Holdings) -> bool:
        """Whether there is room for its workers: they run, or will in a moment."""
        return any(name.startswith(Path(self._folder).name) for name in holdings.mine)

    def abort(self) -> None:
        """Ends the pool and what is left of its workers at once."""
        self._trainer.abort()

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            if not self._trainer.aborted:
                self.error = error
        finally:
            self._free_room()
            shutil.rmtree(self._folder, ignore_errors=True)  # the system cleans up after those that stay

    def _free_room(self) -> None:
        """Gives back what the workers took, which Ray keeps for a controller that was ended until the driver ends too."""
        if not ray.is_initialized():  # then all of it is gone
            return
        for entry in placement_group_table().values():
            if entry["name"].startswith(Path(self._folder).name) and entry["state"] != "REMOVED":
                with contextlib.suppress(ValueError):  # it went meanwhile
                    remove_placement_group(get_placement_group(entry["name"]))


def _trainer(job: Job, loop: Callable[[], Any], **arguments: Any) -> Abortable:
    if job.framework == "tensorflow":
        config = GroupTensorflowConfig() if job.uses_tf_distribute else InPlaceConfig()
        return AbortableTensorflowTrainer(loop, backend_config=config, **arguments)
    # Without GPUs the controller is spared to load PyTorch, which takes it longer than all else before workers can start.
    in_place = InPlaceTorchConfig() if job.scaling.uses_gpu else InPlaceConfig()
    return AbortableTorchTrainer(loop, backend_config=in_place, **arguments)


def environment(job: Job) -> dict[str, str]:
    """What must be set before a worker imports its numerical libraries."""
    variables = {"OMP_NUM_THREADS": str(job.train.threads), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if job.framework == "tensorflow":
        variables |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    if job.train.portable:
        variables |= {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
    return variables
