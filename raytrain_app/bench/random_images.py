"""MNIST's models on random images, as many as a measurement needs: what the pixels show does not change how long a step takes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from raytrain_app.task import Rows
from raytrain_app.tasks.mnist import Mnist


class RandomImages(Mnist):
    """`data.source` is the number of rows."""

    def generate(self, source: str) -> Mapping[str, Rows]:
        rng = np.random.Generator(np.random.PCG64(0))
        x = rng.integers(0, 256, (int(source), *self.columns.shape), np.uint8)
        return {"train": (x, np.arange(len(x)) % self.columns.num_classes)}


TASK = RandomImages()
