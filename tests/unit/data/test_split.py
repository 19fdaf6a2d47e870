"""The validation split: disjoint, stratified, exact in number, and dependent on labels and seed alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_app.data.split import hold_out

label_lists = st.lists(st.integers(0, 5), min_size=1, max_size=300)


@given(labels=label_lists, fraction=st.floats(0, 0.99), seed=st.integers(0, 2**63 - 1))
def test_disjoint_complete_stratified(labels: list[int], fraction: float, seed: int) -> None:
    y = np.array(labels)
    kept, held = hold_out(y, fraction, seed)
    assert np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(len(y)))
    assert np.array_equal(kept, np.sort(kept))
    assert np.array_equal(held, np.sort(held))
    assert len(held) == round(len(y) * fraction)
    for label in set(labels):
        assert abs((y[held] == label).sum() - (y == label).sum() * fraction) < 1


@given(labels=label_lists, seed=st.integers(0, 100))
def test_repeats_for_any_integer_dtype(labels: list[int], seed: int) -> None:
    first = hold_out(np.array(labels, np.int64), 0.25, seed)
    second = hold_out(np.array(labels, np.uint8), 0.25, seed)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_seeds_differ() -> None:
    y = np.arange(1000) % 10
    assert not np.array_equal(hold_out(y, 0.1, 0)[1], hold_out(y, 0.1, 1)[1])


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_no_fraction_holds_nothing_out(rows: int) -> None:
    kept, held = hold_out(np.zeros(rows, np.int64), 0.0, 0)
    assert (kept.tolist(), held.tolist()) == (list(range(rows)), [])
