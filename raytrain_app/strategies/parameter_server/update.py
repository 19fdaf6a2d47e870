"""The servers' update rules, on one flat range of the parameters.

Each rule takes the same arithmetic steps as the optimizer of `torch.optim` that it is named after, which for Adam is the fused
one, so that with one worker the servers' parameters have the bits of plain training. New parameters are written beside the old
ones, never over them: whoever reads the old ones meanwhile is not disturbed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim.adam import adam

Slots = dict[str, torch.Tensor]
"""What a rule remembers of a range between updates, by name; each of the range's length."""

SLOTS: Mapping[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}


@dataclass(frozen=True)
class Update:
    """An update rule.

    Attributes:
        name: "sgd"; "momentum" (Polyak 1964); "adagrad" (Duchi, Hazan and Singer 2011); "adam" (Kingma and Ba 2015).
        momentum: of "momentum".
        betas: of "adam".
        eps: of "adagrad" and "adam".
        weight_decay: added to the gradient times the parameters (L2).
        decoupled: the decay shrinks the parameters directly instead (Loshchilov and Hutter 2019); "adam" alone.
    """

    name: Literal["sgd", "momentum", "adagrad", "adam"] = "sgd"
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def new_slots(self, like: torch.Tensor) -> Slots:
        """Slots before the first update."""
        return {name: torch.zeros_like(like) for name in SLOTS[self.name]}

    def apply(self, old: torch.Tensor, gradient: torch.Tensor, slots: Slots, lr: float, count: int, new: torch.Tensor) -> None:
        """One update.

        Args:
            old: the parameters; only read, as is `gradient`.
            gradient: of the mean loss.
            slots: changed in place.
            lr: learning rate.
            count: updates up to now, this one included.
            new: takes the new parameters.
        """
        if self.name == "adam":
            adam(
                [new.copy_(old)],
                [gradient],
                [slots["exp_avg"]],
                [slots["exp_avg_sq"]],
                [],
                [torch.tensor(count - 1.0)],
                fused=True,
                decoupled_weight_decay=self.decoupled,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr,
                weight_decay=self.weight_decay,
                eps=self.eps,
                maximize=False,
            )
            return
        if self.weight_decay:
            gradient = gradient.add(old, alpha=self.weight_decay)
        if self.name == "sgd":
            torch.add(old, gradient, alpha=-lr, out=new)
        elif self.name == "momentum":
            slots["momentum_buffer"].mul_(self.momentum).add_(gradient)
            torch.add(old, slots["momentum_buffer"], alpha=-lr, out=new)
        else:
            slots["sum"].addcmul_(gradient, gradient)
            torch.addcdiv(old, gradient, slots["sum"].sqrt().add_(self.eps), value=-lr, out=new)
