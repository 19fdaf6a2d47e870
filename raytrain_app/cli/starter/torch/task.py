"""What to train: the rows, the models and, where they differ from the usual, the loss and the accuracy."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import nn

from raytrain_app.task import Columns, ModelOptions, Pictures, Task


class MlpOptions(ModelOptions):
    """Keys that the job file may give beside `name: mlp`."""

    hidden: int = Field(128, ge=1)


class MyTask(Task):
    """Pictures of 28 x 28 grey pixels in ten classes."""

    columns = Columns(shape=(28, 28), dtype="uint8", num_classes=10)
    models = {"mlp": MlpOptions}

    def torch_model(self, name: str, options: Any) -> nn.Module:
        """Builds the model; it gets float32 pixels in [0, 1] of shape (batch, 28, 28) and returns scores of the classes."""
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(28 * 28, options.hidden),
            nn.ReLU(),
            nn.Linear(options.hidden, self.columns.num_classes),
        )

    def pictures(self, source: str) -> Pictures:
        """What `raytrain predict` turns other pictures into: light digits on dark, 20 of 28 pixels high or wide, as MNIST is."""
        return Pictures(light_on_dark=True, ink=20)

    # Also to override, with what they do by default in raytrain_app/task.py: prepare (raw columns to x and y),
    # torch_inputs (stored rows to model inputs), torch_augment, torch_loss (a SUM over the batch), torch_correct.


TASK = MyTask()
