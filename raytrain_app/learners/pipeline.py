"""A worker's stages of a pipeline: runs microbatches through torch's own schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from raytrain_app.job import ModelParallel

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Loss of outputs (rows, ...) for the numbers of the rows, int64 (rows,)."""
Schedule = PipelineScheduleSingle | PipelineScheduleMulti


class Pipeline:
    """A worker's stages. All workers call `run` with the same rows; the first uses the inputs, the last the loss.

    Args:
        stages: of this worker: one, or of an interleaved schedule every `ways.pipeline`-th of all.
        ways: how many workers there are, and how microbatches go through their stages.
        mesh: whose dimension "pipeline" connects the workers.
        device: where the stages are.
    """

    def __init__(self, stages: Sequence[nn.Module], ways: ModelParallel, mesh: DeviceMesh, device: torch.device) -> None:
        self._stages, self._ways, self._device = stages, ways, device
        self._group, self._number = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
        self._schedules: dict[int, Schedule] = {}
        self._loss: Loss | None = None

    def run(self, inputs: torch.Tensor, loss: Loss, backward: bool) -> None:
        """Forward, and backward if asked, of all rows in microbatches of equal size, the last filled up with copies.

        Args:
            inputs: (rows, ...), at least one row; used by the first worker.
            loss: called by the last worker, in order of the microbatches; row numbers past the last one are copies.
            backward: add up the gradients of the losses.
        """
        size = -(-len(inputs) // self._ways.microbatches)
        which = torch.arange(size * self._ways.microbatches)
        filled = inputs[which.clamp(max=len(inputs) - 1)]
        self._loss = loss
        schedule = self._schedules.get(size) or self._make(size)
        step = schedule.step if backward else schedule.eval
        arguments = (filled,) if self._number == 0 else ()
        target = which if self._number == self._ways.pipeline - 1 else None
        step(*arguments, target=target, return_outputs=False)

    def _make(self, size: int) -> Schedule:
        """A schedule for microbatches of `size` rows: stages agree on the shapes they exchange when it first runs."""
        workers, count = self._ways.pipeline, self._ways.microbatches
        stages = [
            PipelineStage(stage, self._number + turn * workers, workers * len(self._stages), self._device, group=self._group)
            for turn, stage in enumerate(self._stages)
        ]
        schedule: Schedule
        if self._ways.schedule == "interleaved":
            schedule = ScheduleInterleaved1F1B([*stages], count, loss_fn=self._score, scale_grads=False)
        else:
            single = Schedule1F1B if self._ways.schedule == "1f1b" else ScheduleGPipe
            schedule = single(stages[0], count, loss_fn=self._score, scale_grads=False)
        self._schedules[size] = schedule
        return schedule

    def _score(self, outputs: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None, "run sets it"
        return self._loss(outputs, which)
