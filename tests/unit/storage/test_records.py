"""Records on lines: strict JSON, whole lines, and what a killed writer leaves."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_app.errors import StorageError
from raytrain_app.storage import records

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
lines = st.lists(st.dictionaries(st.text(max_size=5), values, max_size=4), max_size=5)


@settings(deadline=None)
@given(lines, lines, st.integers(1, 1000))
def test_what_is_appended_is_read_back_whatever_was_cut(
    tmp_path_factory: pytest.TempPathFactory, first: list[dict[str, Any]], second: list[dict[str, Any]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("records") / "x.jsonl"
    records.append(path, first)
    assert records.parse(path.read_bytes(), "x") == first
    whole = path.read_bytes()
    path.write_bytes(whole[: max(len(whole) - cut, 0)])
    left = records.parse(path.read_bytes(), "x")
    assert left == first[: len(left)]
    records.append(path, second)
    assert records.parse(path.read_bytes(), "x") == left + second


def test_only_strict_json_is_written() -> None:
    record = {
        "loss": float("nan"),
        "best": -np.inf,
        "n": np.int64(3),
        "f": np.float32(0.5),
        "t": (1, [np.float64("inf")]),
        5: True,
    }
    assert json.loads(records.to_json(record)) == {"loss": None, "best": None, "n": 3, "f": 0.5, "t": [1, [None]], "5": True}


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff", b""])
def test_a_damaged_line_is_named(line: bytes) -> None:
    with pytest.raises(StorageError, match="metrics is damaged: line 2 is not a JSON object"):
        records.parse(b'{"a": 1}\n' + line + b'\n{"b": 2}\n', "metrics")
