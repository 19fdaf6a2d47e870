"""A task of your own: is the digit in the picture odd?

Everything that differs from the built-in digits is here: labels made from the source's columns, a model with dropout and
BatchNorm and options of its own, and random shifts of the training images. Where a task does not say otherwise it gets
uint8 pixels scaled to [0, 1], cross-entropy and accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import nn

from raytrain_app.task import Columns, ModelOptions, Task


class ConvOptions(ModelOptions):
    """Keys that the job file may give beside `name: conv`."""

    width: int = Field(16, ge=1, le=256)
    dropout: float = Field(0.2, ge=0, lt=1)


class DigitParity(Task):
    """Pictures of digits, two classes: even and odd."""

    columns = Columns(shape=(28, 28), dtype="uint8", num_classes=2)
    models = {"conv": ConvOptions}

    def prepare(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Replaces each digit by what is left of it divided by two."""
        return {**batch, "label": batch["label"] % 2}

    def torch_model(self, name: str, options: Any) -> nn.Module:
        """Two convolutions and a linear layer, for images of shape (batch, 28, 28)."""
        width = options.width
        return nn.Sequential(
            nn.Unflatten(1, (1, 28)),
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Dropout(options.dropout),
            nn.Linear(2 * width * 16, self.columns.num_classes),
        )

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        """Moves the whole batch by up to two pixels; the generator is seeded, so a repeated step moves it the same way."""
        down, right = torch.randint(-2, 3, (2,)).tolist()
        return torch.roll(x, shifts=(down, right), dims=(1, 2))


TASK = DigitParity()
