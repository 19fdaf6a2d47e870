"""What a reader asks of the object store."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from raytrain_app.data import Blocks
from raytrain_app.data.reader import bring_here, fetch

REFERENCES: list[Any] = ["first", "second"]


class Store:
    """An object store that keeps others waiting a few times.

    Args:
        refusals: what it raises before it answers.
    """

    def __init__(self, *refusals: Exception) -> None:
        self._refusals = list(refusals)
        self.asked: list[tuple[list[str], float]] = []

    def get(self, references: list[str], *, timeout: float) -> list[str]:
        """As `ray.get`."""
        self.asked.append((references, timeout))
        if self._refusals:
            raise self._refusals.pop(0)
        return [f"value of {reference}" for reference in references]


def test_who_waits_in_vain_asks_again_and_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(GetTimeoutError(), GetTimeoutError(), GetTimeoutError())
    monkeypatch.setattr(ray, "get", store.get)
    assert fetch(REFERENCES) == ["value of first", "value of second"]
    assert store.asked == [(REFERENCES, seconds) for seconds in (1, 2, 4, 8)]


def test_what_is_lost_for_good_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", Store(GetTimeoutError(), ObjectLostError("11", None, "")).get)
    with pytest.raises(ObjectLostError):
        fetch(REFERENCES)


@pytest.mark.parametrize(("window", "expected"), [(0, [(REFERENCES, 1.0)]), (2, [])])
def test_all_blocks_come_unless_windows_of_them_are_read(monkeypatch: pytest.MonkeyPatch, window: int, expected: object) -> None:
    store = Store()
    monkeypatch.setattr(ray, "get", store.get)
    bring_here(Blocks(tuple(REFERENCES), (0, 1, 2), (), "uint8", window))
    assert store.asked == expected
