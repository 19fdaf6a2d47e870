"""The set of applied leases: whatever comes in whatever order, each is in it once."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from raytrain_app.strategies.parameter_server.window import Window

numbers = st.integers(0, 40)


@given(st.lists(st.tuples(st.booleans(), numbers)))
def test_behaves_like_a_set(changes: list[tuple[bool, int]]) -> None:
    window, model = Window(), set()
    for adds, number in changes:
        if adds:
            assert window.add(number) == (number not in model)
            model.add(number)
        else:
            window.discard(number)
            model.discard(number)
        assert [n for n in range(45) if n in window] == sorted(model)
        assert len(window) == len(model)
        assert window.missing(45) == [n for n in range(45) if n not in model]
        assert window.low == min(set(range(46)) - model)
        assert Window.from_json(json.loads(json.dumps(window.to_json()))) == window


def test_takes_no_memory_for_what_came_in_order() -> None:
    window = Window()
    for number in range(10_000):
        window.add(number)
    assert window.low == 10_000
    assert not window.above
    assert window.missing(10_002, start=9_000) == [10_000, 10_001]
