"""The only way the engine sees a framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from raytrain_app.elastic.reduce import Layout, Ready, Shard
from raytrain_app.learners.callbacks import Callbacks
from raytrain_app.state import TrainState


class Part(Protocol):
    """One replica of the model with its optimizer, or what a worker has of one that is spread over several.

    Whatever it computes depends on its arguments and its state alone, never on the worker: same rows, same bits.

    Attributes:
        layout: of the flat vector that `shard` gives and `apply` takes.
        device: where that vector is.
    """

    layout: Layout
    device: torch.device

    @property
    def callbacks(self) -> Callbacks:
        """The framework's own callbacks."""
        ...

    @property
    def own_file(self) -> str | None:
        """Name of the file in which the framework saves a whole model; None where it has no such format."""
        ...

    def shard(self, x: np.ndarray, y: np.ndarray, seed: int, ready: Ready | None = None) -> Shard:
        """Gradient of the SUM of the losses of the rows x (rows, *shape), y (rows,), starting from the step's buffers.

        Seeds all random generators with `seed` first. With no rows the gradient and scores are zero. The returned vector
        is valid until the next call. A learner whose gradients come one by one tells `ready` of those that are complete.
        """
        ...

    def apply(self, mean: torch.Tensor, counters: torch.Tensor, lr: float) -> None:
        """Takes an optimizer step with the mean gradient, and takes over the mean buffers and the counters; only reads them."""
        ...

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
        """Scores of rows in evaluation mode: float64 (layout.num_scores,), as in `Shard`."""
        ...

    def metrics(self, extra: Sequence[float]) -> dict[str, float]:
        """The task's own metrics by name, from what their scores have added up to."""
        ...

    def state(self) -> TrainState:
        """A copy of the replica on the host, without progress."""
        ...

    def load(self, state: TrainState) -> None:
        """Takes over a state. Raises StorageError when it is of another model or optimizer."""
        ...

    def weights(self) -> dict[str, np.ndarray]:
        """The parameters alone, by name, on the host."""
        ...

    def export(self) -> bytes:
        """Content of `own_file`: the model with its weights."""
        ...


class Learner(Part, Protocol):
    """A learner that has the whole model in its process."""

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """What the model puts out for rows x (rows, *shape) in evaluation mode: float32, (rows, ...), on the host."""
        ...

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy, on the host, of parameters and float buffers (layout.size,) and of the counters (layout.num_counters,).

        Elements lie where `shard` has their gradients.
        """
        ...

    def load_flat(self, vector: torch.Tensor, counters: torch.Tensor) -> None:
        """Takes over what `flat` gives, from tensors on the host that are only read; the optimizer's state stays."""
        ...


class FastLearner(Learner, Protocol):
    """A learner that also has its framework's own data-parallel step (`train.reduction: fast`)."""

    def connect(self, world_size: int, num_flags: int) -> None:
        """Prepares for a new process group; every member calls it, also before the group's last use is forgotten.

        `num_flags` is the length of the flags that each step comes with.
        """
        ...

    def fast_shard(self, x: np.ndarray, y: np.ndarray, seed: int, num_rows: int, flags: Sequence[float]) -> list[float]:
        """Forward and backward with the framework's own reduction.

        Args:
            num_rows: rows of the whole global batch, by which the summed gradient is divided.
            flags: further numbers of this worker.

        Returns:
            Sums over all workers, right to rounding: of the scores, as `evaluate` gives them, and then of `flags`.

        Raises:
            PeerLost: the reduction failed, and the step works without it.
        """
        ...

    def fast_apply(self, lr: float) -> None:
        """Takes an optimizer step with the gradient that `fast_shard` left."""
        ...

    def share_buffers(self) -> None:
        """Makes all replicas' buffers those of rank 0, before they are evaluated or saved; every member calls it."""
        ...
