"""Softmax regression whose shards take 20 ms each, so that a step does too with two workers."""

from __future__ import annotations

import time

import torch

from raytrain_app.tasks.synthetic import Synthetic


class Slow(Synthetic):
    """See the module."""

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x


TASK = Slow()
