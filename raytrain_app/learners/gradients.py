"""Which gradients of a flat vector are complete while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from raytrain_app.errors import TrainingError


class GradientWatch:
    """Goes backward and tells from which element on all gradients are complete, as they come from the last layer to the first.

    The first time it only looks: where a gradient comes in several parts, as in activation checkpointing that is reentrant, none
    is known to be complete before the end. One that does not come at all holds back those that lie before it.

    Args:
        parameters: whose gradients are watched, by name, in the order of the vector.
        places: where they lie in it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], places: Mapping[str, slice]) -> None:
        self._names = list(parameters)
        self._starts = [places[name].start for name in parameters]
        self._times = [0] * len(self._names)
        self._left = 0
        self._looked, self._comes_whole = False, True
        self._tell: Callable[[int], None] | None = None
        for number, parameter in enumerate(parameters.values()):
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))

    def backward(self, loss: torch.Tensor, tell: Callable[[int], None] | None) -> None:
        """As `loss.backward()`; calls `tell` with ever smaller elements.

        Raises:
            TrainingError: a gradient was told to be complete, and came again.
        """
        self._times, self._left = [0] * len(self._names), len(self._names)
        self._tell = tell if self._looked and self._comes_whole else None
        try:
            loss.backward()
        finally:
            told, self._tell = self._tell is not None, None
        self._looked = True
        if max(self._times, default=0) > 1:
            self._comes_whole = False
            if told:
                name = self._names[self._times.index(max(self._times))]
                raise TrainingError(
                    f"the gradient of {name} came in several parts, which it did not in the first step. If the model recomputes "
                    "activations, have it do so alike in every step, or with torch.utils.checkpoint and use_reentrant=False"
                )

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        self._times[number] += 1
        before = self._left
        while self._left > 0 and self._times[self._left - 1]:
            self._left -= 1
        if self._tell is not None and self._left < before:
            self._tell(self._starts[self._left])
