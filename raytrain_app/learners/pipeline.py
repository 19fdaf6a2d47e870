"""One stage of a pipeline: runs microbatches through torch's own schedules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from raytrain_app.job import ModelParallel

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Loss of outputs (rows, ...) for the numbers of the rows, int64 (rows,)."""
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Pipeline:
    """A worker's stage. All stages call `run` with the same rows; the first uses the inputs, the last the loss.

    Args:
        module: the modules of the stage, one forward.
        ways: how many stages there are, and how microbatches go through them.
        mesh: whose dimension "pipeline" connects the stages.
        device: where the module is.
    """

    def __init__(self, module: nn.Module, ways: ModelParallel, mesh: DeviceMesh, device: torch.device) -> None:
        self._module, self._ways, self._device = module, ways, device
        self._group, self._number = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
        self._schedules: dict[int, PipelineScheduleSingle] = {}
        self._loss: Loss | None = None

    def run(self, inputs: torch.Tensor, loss: Loss, backward: bool) -> None:
        """Forward, and backward if asked, of all rows in microbatches of equal size, the last filled up with copies.

        Args:
            inputs: (rows, ...), at least one row; used by the first stage.
            loss: called by the last stage, in order of the microbatches; row numbers past the last one are copies.
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

    def _make(self, size: int) -> PipelineScheduleSingle:
        """A schedule for microbatches of `size` rows: stages agree on the shapes they exchange when it first runs."""
        stage = PipelineStage(self._module, self._number, self._ways.pipeline, self._device, group=self._group)
        self._schedules[size] = SCHEDULES[self._ways.schedule](
            stage, self._ways.microbatches, loss_fn=self._score, scale_grads=False
        )
        return self._schedules[size]

    def _score(self, outputs: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None, "run sets it"
        return self._loss(outputs, which)
