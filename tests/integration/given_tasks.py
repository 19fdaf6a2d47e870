"""Tasks from outside the package, as users bring them, with the oddities that tests need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from raytrain_app.task import ModelOptions, Rows
from raytrain_app.tasks.mnist import Mnist
from raytrain_app.tasks.synthetic import Synthetic

MARK = 1000.0
"""First feature of the marked row of `Marked`."""


class NoOptions(ModelOptions):
    """A model without options."""


class WithUnused(nn.Module):
    """Softmax regression beside a layer that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(784, 10)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.used(x.flatten(1))
        return y


class Unused(Mnist):
    """Digits with `WithUnused`."""

    models: ClassVar = {"net": NoOptions}

    def torch_model(self, name: str, options: Any) -> nn.Module:
        return WithUnused()


class Marked(Synthetic):
    """Points of which one is marked, so that a test can tell the one shard of an epoch that has it."""

    def generate(self, source: str) -> Mapping[str, Rows] | None:
        splits = super().generate("synthetic")
        assert splits is not None
        splits["train"][0][3, 0] = MARK
        return splits

    def torch_inputs(self, x: torch.Tensor) -> torch.Tensor:
        marked = x[:, 0] == MARK
        x[marked, 0] = 0.0
        if bool(marked.any()):
            self.met_mark()
        return x

    def met_mark(self) -> None:
        """Called on the one worker that computes the marked row."""


class Raising(Marked):
    """Raises on one worker what PyTorch itself raises for shapes that do not fit."""

    def met_mark(self) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


class Exiting(Marked):
    """Calls sys.exit on one worker, as scripts do."""

    def met_mark(self) -> None:
        raise SystemExit("no more")


class NotANumber(Marked):
    """Its loss is NaN on one worker."""

    def torch_inputs(self, x: torch.Tensor) -> torch.Tensor:
        self.met = False
        return super().torch_inputs(x)

    def met_mark(self) -> None:
        self.met = True

    def torch_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().torch_loss(outputs, y)
        return loss * float("nan") if self.met else loss


UNUSED, MARKED, RAISING, EXITING, NOT_A_NUMBER = Unused(), Marked(), Raising(), Exiting(), NotANumber()
