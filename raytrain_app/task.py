"""What a user brings to train: the shape of the rows, the models, the loss and what counts as correct.

A task is one file that defines a subclass of `Task` and an instance of it. Built-in tasks are found by their name
(`task: mnist`), a user's own by `package.module:TASK`. Only that name travels to the workers; each of them imports the
task and builds its model itself.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from raytrain_app.errors import JobError

if TYPE_CHECKING:
    import torch

BUILT_IN = {"mnist": "raytrain_app.tasks.mnist:TASK", "synthetic": "raytrain_app.tasks.synthetic:TASK"}


class ModelOptions(BaseModel):
    """Base of a model's own options (the keys beside `name` under `model:`); unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Columns:
    """What every row must look like after reading.

    Attributes:
        shape: shape of one `x`, such as (28, 28).
        dtype: numpy name of the dtype of `x`: "uint8", "float32", ...
        num_classes: labels `y` are integers in [0, num_classes).
        x_names: column names accepted for `x`, in order of preference, where the source has named columns.
        y_names: the same for `y`.
    """

    shape: tuple[int, ...]
    dtype: str
    num_classes: int
    x_names: tuple[str, ...] = ("x", "image", "images", "pixels", "features")
    y_names: tuple[str, ...] = ("y", "label", "labels", "target")


Rows = tuple[np.ndarray, np.ndarray]


class Task:
    """Base class of all tasks. Override what differs from image classification with cross-entropy.

    The engine trains on the SUM of the losses of a shard and divides by the global batch, so `torch_loss` returns a sum.
    """

    columns: ClassVar[Columns]
    models: ClassVar[Mapping[str, type[ModelOptions]]]
    default_source: ClassVar[str] = "mnist-sample"

    def generate(self, source: str) -> Mapping[str, Rows] | None:
        """Rows that the task makes itself instead of reading them.

        Args:
            source: the job's `data.source`.

        Returns:
            {"train": (x, y), "test": (x, y)} with x of shape (rows, *columns.shape) and y int64 of shape (rows,), or
            None when `source` names something to be read.
        """
        return None

    def prepare(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Turns a batch of the source's raw columns into columns named by `columns.x_names` and `columns.y_names`.

        Runs in Ray Data, before validation, once per run. The default changes nothing.
        """
        return batch

    def torch_model(self, name: str, options: Any) -> torch.nn.Module:
        """Builds model `name`; `options` is an instance of `models[name]`. Random generators are seeded by the caller."""
        raise JobError(
            f"task {type(self).__name__} has no PyTorch models; it must define torch_model to train with framework: torch"
        )

    def torch_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Turns stored rows (batch, *shape) on the device into what the model takes: uint8 becomes float32 in [0, 1]."""
        import torch

        return x.to(torch.float32) / 255.0 if x.dtype == torch.uint8 else x

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        """Changes training inputs at random; torch's, numpy's and Python's generators are seeded per shard before."""
        return x

    def torch_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Sum (not mean) of the losses of a batch, a scalar."""
        import torch

        return torch.nn.functional.cross_entropy(outputs, y, reduction="sum")

    def torch_correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Number of rows predicted correctly, a scalar."""
        return (outputs.argmax(dim=1) == y).sum()


def load_task(name: str) -> Task:
    """Finds a task by built-in name or `package.module:TASK`; the current folder is searched too.

    Raises:
        JobError: there is no such task, its module cannot be imported, or the name is not a `Task`.
    """
    target = BUILT_IN.get(name, name)
    if ":" not in target:
        near = difflib.get_close_matches(name, BUILT_IN, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise JobError(f"task: {name!r} is not a built-in task ({', '.join(BUILT_IN)}) nor of the form package.module:TASK{hint}")
    module_name, _, attribute = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise JobError(f"task: module {error.name!r} was not found; looked in {os.getcwd()} and the installed packages") from None
    task = getattr(module, attribute, None)
    if not isinstance(task, Task):
        found = "nothing" if task is None else f"a {type(task).__name__}"
        raise JobError(
            f"task: {module_name} has {found} under the name {attribute!r}; expected an instance of raytrain_app.task.Task"
        )
    return task
