"""Ray Train's side of a pool: what its controller runs, in a process of its own, which need not load PyTorch for it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import (
    WorkerGroup,
    WorkerGroupContext,
    WorkerGroupPollStatus,
    state,
    worker_group,
)
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2.api.config import ScalingConfig
from ray.util import placement_group


class InPlaceBackend(Backend):
    """A backend that starts nothing, since workers connect by themselves, and makes Ray Train replace single workers."""

    has_replica_groups = True


class InPlaceConfig(BackendConfig):
    """Of workers that connect by themselves. Ray's own prepare process groups, TF_CONFIG, and legacy Keras."""

    @property
    def backend_cls(self) -> type[Backend]:
        return InPlaceBackend


class GroupBackend(Backend):
    """Ray's own backend for tf.distribute, which tells each worker of the others in TF_CONFIG."""

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        # Ray's module imports TensorFlow, for which the driver has no use: this runs in the controller.
        from ray.train.tensorflow.config import TensorflowConfig

        TensorflowConfig().backend_cls().on_start(worker_group, backend_config)


class GroupTensorflowConfig(BackendConfig):
    """Of a group of workers that all end when one is lost."""

    @property
    def backend_cls(self) -> type[Backend]:
        return GroupBackend


class PoolSize(FixedScalingPolicy):
    """As many workers as the pool was made for.

    Ray Train's own policy tells a further actor of them, which asks the autoscaler for room; workers wait until it has started.
    Their placement group asks for the same.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass


class NoMeetings:
    """Instead of the actor where the workers of a pool meet to report, a process: ours report to the membership.

    It has what Ray Train's controller calls of it; workers call it in `ray.train.report` and `ray.train.collective` alone.
    """

    @classmethod
    def options(cls, **_: Any) -> type[NoMeetings]:
        return cls

    @classmethod
    def remote(cls, **_: Any) -> NoMeetings:
        return cls()

    @property
    def reset(self) -> Any:
        return SimpleNamespace(remote=lambda: ray.put(None))


class NamedWorkerGroup(WorkerGroup):
    """Workers whose placement group has the name of the folder of their Ray Train run in front, by which `Pool` finds it."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        # Ray Train has no option for it; this process is the controller's alone.
        vars(worker_group)["SynchronizationActor"] = NoMeetings
        vars(state)["_shutdown_sync_actor"] = lambda nobody: None
        super().__init__(*arguments, **keywords)

    def _create_placement_group(
        self, scaling_config: ScalingConfig, worker_group_context: WorkerGroupContext
    ) -> DefaultPlacementGroupHandle:
        context, run = worker_group_context, self._train_run_context
        return DefaultPlacementGroupHandle(
            placement_group(
                [context.resources_per_worker] * context.num_workers,
                strategy=context.placement_strategy,
                name=f"{Path(str(run.run_config.storage_path)).name}-{context.run_attempt_id}",
                bundle_label_selector=context.label_selector,
            )
        )


class InPlaceController(TrainController):
    """Ray Train's controller, which can be there before there is anything to control, and bears workers that die together.

    Its process takes a second or two to start, which a node that comes need not wait for.

    Before it replaces a worker, it asks all that it believes alive to drop their reports; when one of those has died too, the
    call fails, and with it the whole run. So all that are known to be dead are given up first.
    """

    worker_group_cls = NamedWorkerGroup

    def __init__(self) -> None:
        """Does nothing yet: `take` begins."""

    def take(self, arguments: Mapping[str, Any]) -> None:
        """Takes a Ray Train run over, with what Ray Train's own controller is made with; `run` follows."""
        super().__init__(**arguments)

    def _replace_bad_workers(self, poll_status: WorkerGroupPollStatus) -> None:
        groups: Any = self._worker_group
        for index in poll_status.failing_replica_group_indices:
            groups._replica_groups[index].shutdown()
        # One more may have died since the poll: then the next poll, half a second later, tells of all of them.
        with contextlib.suppress(RayActorError):
            super()._replace_bad_workers(poll_status)
