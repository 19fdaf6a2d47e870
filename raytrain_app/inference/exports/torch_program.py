"""torch: a program that `torch.export.load` runs anywhere, without the task's code; it takes rows as they are stored."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import nn

from raytrain_app.inference.trained import BATCH_ROWS, Trained

if TYPE_CHECKING:
    from raytrain_app.learners.torch import TorchLearner


class FromRows(nn.Module):
    """The model with the task's preparation of inputs before it, in the precision that it was trained in."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        learner = cast("TorchLearner", trained.learner)
        self.model = copy.deepcopy(learner.model).to("cpu").eval()
        for parameter in self.model.parameters():
            # Parameters are views of one long vector; an export would hold all of it for each.
            parameter.data, parameter.grad = parameter.data.clone(), None
        self._task, self._bf16 = trained.task, trained.job.train.precision == "bf16"
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            outputs: torch.Tensor = self.model(self._task.torch_inputs(x))
        return outputs.float()


def sample(trained: Trained) -> torch.Tensor:
    """Two rows of zeros, to trace the model with."""
    columns = trained.task.columns
    return torch.from_numpy(np.zeros((2, *columns.shape), columns.dtype))


def program(trained: Trained) -> torch.export.ExportedProgram:
    """The model as a program for any number of rows."""
    with torch.no_grad():
        return torch.export.export(
            FromRows(trained), (sample(trained),), dynamic_shapes=({0: torch.export.Dim("rows")},), strict=False
        )


def write(trained: Trained, path: Path) -> None:
    torch.export.save(program(trained), path)


def outputs(trained: Trained, path: Path, x: np.ndarray) -> np.ndarray:
    module = torch.export.load(path).module()
    with torch.inference_mode():
        parts = [module(torch.tensor(x[i : i + BATCH_ROWS])).numpy() for i in range(0, len(x), BATCH_ROWS)]
    return np.concatenate(parts)
