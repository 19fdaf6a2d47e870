"""The servers' update rules have the bits of torch.optim, in one piece or in ranges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from raytrain_app.strategies.parameter_server.shard import ranges
from raytrain_app.strategies.parameter_server.update import Update

SIZE, STEPS = 16 * 157, 5

RULES: dict[str, tuple[Update, Callable[[torch.nn.Parameter], torch.optim.Optimizer]]] = {
    "sgd": (Update("sgd"), lambda w: torch.optim.SGD([w], lr=0.1)),
    "sgd, decay": (Update("sgd", weight_decay=0.01), lambda w: torch.optim.SGD([w], lr=0.1, weight_decay=0.01)),
    "momentum": (Update("momentum", momentum=0.8), lambda w: torch.optim.SGD([w], lr=0.1, momentum=0.8)),
    "adagrad": (Update("adagrad", eps=1e-10), lambda w: torch.optim.Adagrad([w], lr=0.1)),
    "adam": (Update("adam", betas=(0.8, 0.99)), lambda w: torch.optim.Adam([w], fused=True, lr=0.1, betas=(0.8, 0.99))),
    "adam, decay": (Update("adam", weight_decay=0.01), lambda w: torch.optim.Adam([w], fused=True, lr=0.1, weight_decay=0.01)),
    "adamw": (
        Update("adam", weight_decay=0.01, decoupled=True),
        lambda w: torch.optim.AdamW([w], fused=True, lr=0.1, weight_decay=0.01),
    ),
}


def gradient(step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SIZE, generator=generator, dtype=dtype) * 10.0 ** torch.randint(-6, 3, (SIZE,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_equals_torch(name: str, servers: int, dtype: torch.dtype) -> None:
    rule, optimizer_of = RULES[name]
    expected = torch.nn.Parameter(gradient(99, dtype))
    optimizer = optimizer_of(expected)
    parts = [expected.detach()[start:stop].clone() for start, stop in ranges(SIZE, servers)]
    slots = [rule.new_slots(part) for part in parts]
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        expected.grad = gradient(step, dtype)
        optimizer.step()
        for number, (start, stop) in enumerate(ranges(SIZE, servers)):
            new, old = torch.empty_like(parts[number]), parts[number].clone()
            rule.apply(parts[number], gradient(step, dtype)[start:stop], slots[number], 0.1 / (step + 1), step + 1, new)
            assert torch.equal(parts[number], old), "a version that others may read was changed"
            parts[number] = new
        assert torch.equal(torch.cat(parts), expected.detach())


@pytest.mark.parametrize(("size", "servers"), [(0, 1), (1, 3), (64, 2), (1000, 7), (7_850, 4)])
def test_ranges_cover_everything_once_and_are_aligned(size: int, servers: int) -> None:
    found = ranges(size, servers)
    assert len(found) == servers
    assert [n for start, stop in found for n in range(start, stop)] == list(range(size))
    assert all(start % 64 == 0 or start == size for start, _ in found)
    if size > 64 * servers:
        assert max(stop - start for start, stop in found) - min(stop - start for start, stop in found) <= 128
