"""Tasks whose steps take long enough for faults to fall between them."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch

from raytrain_app.elastic.plan import shard_seed
from raytrain_app.tasks.synthetic import Synthetic

SECONDS_A_SHARD = 0.01
STUCK_ONCE = Path(tempfile.gettempdir(), "raytrain-test-stuck-once")
SLOWER_WHILE = Path(tempfile.gettempdir(), "raytrain-test-slower-while")
CRASH_SEED = shard_seed([0, 1, 30, 0])


class Quick(Synthetic):
    """Points with noise, so that the result is sensitive to any change."""

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.01 * torch.randn_like(x)


class Slow(Quick):
    """The same, and each shard takes its time; it ends as the quick one does."""

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS_A_SHARD)
        return super().torch_augment(x)


class Slower(Slow):
    """Takes ten times as long while `SLOWER_WHILE` is there, for what has to happen before the run is over."""

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        if SLOWER_WHILE.exists():
            time.sleep(9 * SECONDS_A_SHARD)
        return super().torch_augment(x)


class Crashing(Slow):
    """Ends its process without a word when it comes to the first shard of step 30, which is in the second epoch."""

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        if torch.initial_seed() == CRASH_SEED:
            os._exit(17)
        return super().torch_augment(x)


class Stuck(Slow):
    """Comes to a halt at the first shard of step 30, but only once: whoever takes the step again gets through."""

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        if torch.initial_seed() == CRASH_SEED and not STUCK_ONCE.exists():
            STUCK_ONCE.touch()
            time.sleep(600)
        return super().torch_augment(x)


SLOW, SLOWER, QUICK, CRASHING, STUCK = Slow(), Slower(), Quick(), Crashing(), Stuck()
