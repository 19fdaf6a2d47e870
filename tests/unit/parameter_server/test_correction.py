"""Corrections of stale gradients, against their formulas written out for one element."""

from __future__ import annotations

import math

import pytest
import torch

from raytrain_app.strategies.parameter_server.correction import DELAY_EPS, DELAY_LAMBDA, DELAY_MEAN, Correction, root_mean_square

GRADIENT, NOW, BASE = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 5.0]), torch.tensor([0.5, 7.0])


@pytest.mark.parametrize("name", ["none", "staleness", "gap", "delay"])
def test_a_fresh_gradient_is_left_as_it_is(name: str) -> None:
    correction = Correction(name)  # type: ignore[arg-type]
    slots = correction.new_slots(NOW)
    found = correction.apply(GRADIENT, 0.1, 0, NOW, NOW, slots)
    assert torch.equal(found.gradient, GRADIENT)
    assert (found.lr, found.divisor) == (0.1, None)


def test_none_does_nothing() -> None:
    found = Correction("none").apply(GRADIENT, 0.1, 9, NOW, BASE, {})
    assert torch.equal(found.gradient, GRADIENT)
    assert (found.lr, found.divisor) == (0.1, None)


@pytest.mark.parametrize("name", ["staleness", "gap", "delay"])
def test_without_the_base_the_rate_is_divided_by_the_staleness(name: str) -> None:
    correction = Correction(name)  # type: ignore[arg-type]
    found = correction.apply(GRADIENT, 0.1, 4, NOW, None, correction.new_slots(NOW))
    assert torch.equal(found.gradient, GRADIENT)
    assert (found.lr, found.divisor) == (0.1 / 4, None)


def test_gap() -> None:
    correction = Correction("gap")
    slots = correction.new_slots(NOW)
    correction.learn(BASE, NOW, slots)
    unit = math.sqrt((0.5**2 + 2.0**2) / 2)
    assert float(slots["update_size"]) == pytest.approx(unit)
    found = correction.apply(GRADIENT, 0.1, 3, NOW, BASE, slots)
    assert torch.equal(found.gradient, GRADIENT)
    assert found.lr == 0.1
    assert found.divisor is not None
    assert found.divisor.tolist() == pytest.approx([1 + 0.5 / unit, 1 + 2.0 / unit])


def test_delay() -> None:
    correction = Correction("delay")
    slots = correction.new_slots(NOW)
    before = GRADIENT.clone()
    found = correction.apply(GRADIENT, 0.1, 3, NOW, BASE, slots)
    expected = []
    for g, now, base in zip(GRADIENT.tolist(), NOW.tolist(), BASE.tolist(), strict=True):
        strength = DELAY_LAMBDA / math.sqrt((1 - DELAY_MEAN) * g * g + DELAY_EPS)
        expected.append(g + strength * g * g * (now - base))
    assert found.gradient.tolist() == pytest.approx(expected, rel=1e-5)
    assert (found.lr, found.divisor) == (0.1, None)
    assert torch.equal(GRADIENT, before), "the sender's memory was changed"


def test_root_mean_square() -> None:
    assert root_mean_square(torch.tensor([3.0, 0.0, 0.0, 4.0]), torch.zeros(4)) == pytest.approx(2.5)
    assert root_mean_square(torch.empty(0), torch.empty(0)) == 0.0
