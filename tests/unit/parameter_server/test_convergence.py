"""Every mode learns the embedded digits with eight workers of which one is ten times slower, in the benchmark's virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_app.bench.ps_corrections import MODES, OPTIMIZERS, Comparison, Digits, Learned, make_job, simulate
from raytrain_app.job.strategies import ParameterServer

ADAM, SGD, MOMENTUM = OPTIMIZERS.values()


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits.embedded()


@pytest.fixture(scope="module")
def synchronous(digits: Digits) -> Learned:
    """Four epochs of plain steps, at the pace of the slow worker."""
    return learn(digits, sync="bulk")


def learn(digits: Digits, **strategy: Any) -> Learned:
    return simulate(make_job("linear", SGD, **strategy), digits)


@pytest.mark.parametrize(("correction", "behind"), [("none", 0.02), ("staleness", 0.05), ("gap", 0.03), ("delay", 0.02)])
def test_asynchronous(correction: str, behind: float, digits: Digits, synchronous: Learned) -> None:
    learned = learn(digits, correction=correction)
    assert learned.accuracy >= synchronous.accuracy - behind
    assert learned.time <= synchronous.time / 7
    assert learned.staleness >= 50, "the slow worker's gradients were taken"
    assert learned.refused == 0


def test_refusing_keeps_old_gradients_out(digits: Digits, synchronous: Learned) -> None:
    learned = learn(digits, staleness=8)
    assert learned.accuracy >= synchronous.accuracy - 0.03
    assert learned.staleness <= 8
    assert learned.refused > 0


@pytest.mark.parametrize("staleness", [0, 4])
def test_bounded(staleness: int, digits: Digits, synchronous: Learned) -> None:
    learned = learn(digits, sync="bounded", staleness=staleness)
    assert learned.accuracy >= synchronous.accuracy - 0.02
    assert learned.staleness == staleness
    assert learned.refused == 0


def test_the_default_learns_with_adam(digits: Digits) -> None:
    assert simulate(make_job("linear", ADAM), digits).accuracy >= 0.85


def test_the_default_learns_where_uncorrected_gradients_get_stuck(digits: Digits) -> None:
    assert simulate(make_job("mlp", MOMENTUM), digits).accuracy >= 0.80
    assert simulate(make_job("mlp", MOMENTUM, 2, correction="none"), digits).accuracy <= 0.30


@pytest.mark.slow
def test_the_default_reaches_95_percent_with_a_convolutional_network(digits: Digits) -> None:
    assert simulate(make_job("cnn", ADAM, 8), digits).accuracy >= 0.95


def test_the_best_correction_is_that_which_is_least_behind_at_its_worst() -> None:
    bulk = dict.fromkeys(MODES, 0.9)
    found = Comparison(
        {
            ("linear", "SGD 0.1"): {**bulk, "staleness": 0.7, "gap": 0.85, "delay": 0.8},
            ("cnn", "SGD 0.1"): {**bulk, "none": 0.1, "delay": 0.95},
        },
        dict.fromkeys(MODES, 1.0),
    )
    assert found.best == "gap"
    assert found.shortfall("none") == pytest.approx(0.8)
    assert found.lines()[-1] == f"least behind: gap; the default is {ParameterServer.model_fields['correction'].default}"
