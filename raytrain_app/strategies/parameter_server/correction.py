"""What is done about a gradient that was computed at older parameters than those it is applied to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from raytrain_app.strategies.parameter_server.update import Slots

DELAY_LAMBDA, DELAY_MEAN, DELAY_EPS = 2.0, 0.95, 1e-7
"""Strength, decay of the running mean and guard against zero of the adaptive delay compensation; the paper's values."""
GAP_MEAN = 0.99
"""Decay of the running mean of an update's size, the unit in which a gap is measured."""


@dataclass(frozen=True)
class Corrected:
    """What is left of a gradient.

    Attributes:
        gradient: to update with.
        lr: to update with.
        divisor: by which the step that comes of it is divided, element by element; None leaves it as it is.
    """

    gradient: torch.Tensor
    lr: float
    divisor: torch.Tensor | None = None


@dataclass(frozen=True)
class Correction:
    """A correction of stale gradients.

    Attributes:
        name: "none".
            "staleness": the learning rate is divided by the number of updates that the gradient missed (W. Zhang, Gupta,
            Lian and Liu, Staleness-aware Async-SGD, IJCAI 2016).
            "gap": the step of each element is divided by 1 plus the distance that its parameter has moved since, in units of
            the size of one update (Barkai, Hakimi and Schuster, Gap-Aware Mitigation of Gradient Staleness, ICLR 2020, who
            divide the gradient: the same for plain steps, but rules that normalize gradients would undo it).
            "delay": the gradient at the current parameters is approximated to first order, with lambda * g * g for the
            Hessian's diagonal and lambda set by a running mean of g * g (Zheng, Meng, Wang, Chen, Yu, Ma and Liu,
            Asynchronous SGD with Delay Compensation, ICML 2017: DC-ASGD-a).
    """

    name: Literal["none", "staleness", "gap", "delay"] = "none"

    @property
    def needs_base(self) -> bool:
        """Whether it must know the parameters at which the gradient was computed."""
        return self.name in ("gap", "delay")

    def new_slots(self, like: torch.Tensor) -> Slots:
        """What it remembers between updates."""
        if self.name == "delay":
            return {"mean_square": torch.zeros_like(like)}
        return {"update_size": torch.zeros(1, dtype=torch.float64)} if self.name == "gap" else {}

    def apply(
        self, gradient: torch.Tensor, lr: float, staleness: int, now: torch.Tensor, base: torch.Tensor | None, slots: Slots
    ) -> Corrected:
        """Corrects a gradient; one that missed nothing is left as it is.

        Args:
            gradient: only read.
            lr: learning rate.
            staleness: updates between `base` and `now`.
            now: current parameters.
            base: those at which the gradient was computed. None where they are not known any more, after a server was
                restored; then the staleness rule, which does without them, takes the place of the others.
            slots: changed in place.
        """
        if self.name == "delay":
            slots["mean_square"].mul_(DELAY_MEAN).addcmul_(gradient, gradient, value=1 - DELAY_MEAN)
        if staleness == 0 or self.name == "none":
            return Corrected(gradient, lr)
        if self.name == "staleness" or base is None:
            return Corrected(gradient, lr / staleness)
        if self.name == "gap":
            size = float(slots["update_size"])
            return Corrected(gradient, lr, (now - base).abs_().div_(size).add_(1.0) if size > 0 else None)
        strength = (slots["mean_square"] + DELAY_EPS).rsqrt_().mul_(DELAY_LAMBDA)
        return Corrected(strength.mul_(gradient).mul_(gradient).mul_(now - base).add_(gradient), lr)

    def learn(self, old: torch.Tensor, new: torch.Tensor, slots: Slots) -> None:
        """Is told of each update."""
        if self.name == "gap" and old.numel():
            size = root_mean_square(new, old)
            known = float(slots["update_size"])
            slots["update_size"].fill_(size if known == 0.0 else GAP_MEAN * known + (1 - GAP_MEAN) * size)


def root_mean_square(a: torch.Tensor, b: torch.Tensor) -> float:
    """Distance of two ranges of parameters: the root of the mean squared difference."""
    return float(torch.dist(a, b)) / math.sqrt(max(1, a.numel()))
