"""Softmax regression whose shards take 20 ms each, so that a step does too, in epochs of about 20 s."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from raytrain_app.task import Rows
from raytrain_app.tasks.synthetic import Synthetic

COPIES = 40


class Slow(Synthetic):
    """See the module."""

    def generate(self, source: str) -> Mapping[str, Rows] | None:
        splits = super().generate("synthetic")
        assert splits is not None
        x, y = splits["train"]
        return {**splits, "train": (np.tile(x, (COPIES, 1)), np.tile(y, COPIES))}

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x


TASK = Slow()
