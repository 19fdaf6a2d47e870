"""Digits that are learned slowly while a file is there, so that what happens to the machines happens within the run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from raytrain_app.tasks.mnist import Mnist

SHARD_S = 0.6


class Paced(Mnist):
    """As the built-in task but for the pace."""

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        keep_pace()
        return x

    def keras_callbacks(self, keras: Any, directory: str) -> Sequence[Any]:
        class Pace(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                keep_pace()

        return [Pace()]


def keep_pace() -> None:
    """Waits while the file is there."""
    if Path(os.environ["SLOW_WHILE"]).exists():
        time.sleep(SHARD_S)


TASK = Paced()
