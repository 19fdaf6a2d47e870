"""MNIST on workers of uneven speed: every row takes time, and on the first worker of each pool ten times as much.

The time is slept, so that as many workers as one likes run side by side on a small machine.
"""

from __future__ import annotations

import time

import ray.train
import torch

from raytrain_app.tasks.mnist import Mnist

ROW_S = 0.00025
SLOWER = 10


class Uneven(Mnist):
    """See the module."""

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(ROW_S * len(x) * (SLOWER if ray.train.get_context().get_world_rank() == 0 else 1))
        return x


TASK = Uneven()
