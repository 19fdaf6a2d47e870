"""Digits that take their time, so that something can happen while they are learned."""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from raytrain_app.tasks.mnist import Mnist

TRAP = Path(tempfile.gettempdir(), "raytrain-tests-trap")


class Paced(Mnist):
    """Every gradient takes at least 20 ms; whoever finds the trap, and takes it away, hangs."""

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        with suppress(FileNotFoundError):
            TRAP.unlink()
            time.sleep(3600)
        return x


TASK = Paced()
