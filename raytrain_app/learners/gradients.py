"""Which gradients of a flat vector are complete while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from raytrain_app.errors import TrainingError


class GradientWatch:
    """Goes backward and tells from which element on all gradients are complete, as they come from the last layer to the first.

    The first time it only looks: where a gradient comes in several parts, as in activation checkpointing that is reentrant, or is
    changed after it has come, by a hook of the task's own, none is known to be complete before the end. One that does not come
    at all holds back those that lie before it.

    Args:
        parameters: whose gradients are watched, by name, in the order of the vector.
        places: where they lie in it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], places: Mapping[str, slice]) -> None:
        self._parameters = dict(parameters)
        self._names = list(parameters)
        self._starts = [places[name].start for name in parameters]
        self._come: list[bool] = []
        self._left = 0
        self._first: dict[str, torch.Tensor] | None = {}  # gradients as they came the first time; None from then on
        self._come_whole = True
        self._tell: Callable[[int], None] | None = None
        for number, parameter in enumerate(parameters.values()):
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))

    def backward(self, loss: torch.Tensor, tell: Callable[[int], None]) -> None:
        """As `loss.backward()`; calls `tell` with ever smaller elements.

        Raises:
            TrainingError: a gradient was told to be complete, and came again.
        """
        self._come, self._left = [False] * len(self._names), len(self._names)
        self._tell = tell if self._first is None and self._come_whole else None
        try:
            loss.backward()
        finally:
            self._tell, self._come = None, []
        if self._first is not None:
            for name, gradient in self._first.items():
                # Bits and not values: what is no number is not equal to itself.
                same = torch.equal(gradient.view(torch.uint8), _copy(self._parameters[name]).view(torch.uint8))
                self._come_whole = self._come_whole and same
            self._first = None

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        if not self._come:  # another backward, which nobody watches
            return
        if self._come[number]:
            self._come_whole = False
            if self._tell is not None and number >= self._left:
                raise TrainingError(
                    f"the gradient of {self._names[number]} came in several parts, which it did not in the first step. If the "
                    "model recomputes activations, have it do so in every step, or with torch.utils.checkpoint and "
                    "use_reentrant=False"
                )
        self._come[number] = True
        if self._first is not None:
            self._first[self._names[number]] = _copy(parameter)
        before = self._left
        while self._left > 0 and self._come[self._left - 1]:
            self._left -= 1
        if self._tell is not None and self._left < before:
            self._tell(self._starts[self._left])


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient as it is now, flat."""
    assert parameter.grad is not None, "it has come"
    return parameter.grad.reshape(-1).clone()
