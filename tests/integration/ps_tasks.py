"""Digits that take their time, so that something can happen while they are learned."""

from __future__ import annotations

import time

import torch

from raytrain_app.tasks.mnist import Mnist


class Paced(Mnist):
    """Every gradient takes at least 20 ms."""

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x


TASK = Paced()
