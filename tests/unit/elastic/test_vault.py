"""The vault: the newest snapshot that is whole."""

from __future__ import annotations

import numpy as np

from raytrain_app.elastic.vault import Vault


def data(value: int) -> np.ndarray:
    return np.full(3, value, np.uint8)


def test_the_newest_snapshot_stays() -> None:
    vault = Vault()
    assert vault.newest() is None
    vault.put(5, data(1))
    vault.put(4, data(2))
    assert vault.newest() == 5
    found = vault.get(5)
    assert found is not None
    assert found.tolist() == [1, 1, 1]
    assert vault.get(4) is None


def test_a_snapshot_in_parts_counts_when_all_parts_are_there() -> None:
    vault = Vault()
    vault.put(5, data(50), 0, 2)
    vault.put(5, data(51), 1, 2)
    vault.put(8, data(80), 0, 2)
    assert vault.newest() == 5, "the other half of the newer one is missing"
    vault.put(9, data(91), 1, 2)
    vault.put(8, data(81), 1, 2)
    assert vault.newest() == 8
    found = vault.get(8, 1)
    assert found is not None
    assert found[0] == 81
    assert vault.get(5, 0) is None
    vault.put(9, data(90), 0, 2)
    assert vault.newest() == 9
