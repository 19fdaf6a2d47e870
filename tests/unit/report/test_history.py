"""Columns from metrics.jsonl, thinning, and the clock that leaves stops out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_app.errors import StorageError
from raytrain_app.report.history import RunClock, parse_history, smooth, thin, throughput
from tests.unit.report.making import metrics, step


def encode(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def test_columns_hold_every_number_of_every_line() -> None:
    lines = metrics(25)
    history = parse_history(encode(lines), "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    for kind, columns in ((steps, history.steps), (epochs, history.epochs)):
        for name in ("step", "epoch", "samples", "workers", "loss", "accuracy", "lr", "time"):
            assert columns[name].tolist() == [line[name] for line in kind]
    assert history.epochs["val_loss"].tolist() == [line["val_loss"] for line in epochs]
    assert np.isnan(history.steps["val_loss"]).all()
    assert history.num_steps == 25


def test_what_a_strategy_adds_becomes_a_column_and_text_does_not() -> None:
    history = parse_history(encode([step(1, staleness=2, note="x"), step(2, staleness=3.5), step(3)]), "metrics.jsonl")
    assert np.array_equal(history.steps["staleness"], [2.0, 3.5, np.nan], equal_nan=True)
    assert "note" not in history.steps


def test_null_is_nan_and_an_unfinished_last_line_is_left_out() -> None:
    whole = encode([step(1, loss=None)])
    history = parse_history(whole + b'{"kind": "step", "ste', "metrics.jsonl")
    assert history.num_steps == 1
    assert np.isnan(history.steps["loss"]).all()
    assert history.size_bytes == len(whole)


def test_a_run_without_lines_has_empty_columns() -> None:
    history = parse_history(b"", "metrics.jsonl")
    assert history.num_steps == 0
    assert len(history.epochs["val_accuracy"]) == 0


@pytest.mark.parametrize("line", [b"nonsense\n", b"[1, 2]\n", b'{"kind": "step", "step": "three"}\n'])
def test_a_damaged_line_is_named(line: bytes) -> None:
    with pytest.raises(StorageError, match=r"some/metrics\.jsonl is damaged"):
        parse_history(encode([step(1)]) + line, "some/metrics.jsonl")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(4, 300))
def test_thinning_keeps_the_extremes_the_ends_and_the_order(values: list[float], points: int) -> None:
    x, y = np.arange(len(values)), np.array(values)
    thin_x, thin_y = thin(x, y, points)
    assert len(thin_x) <= points
    assert (thin_x[0], thin_x[-1]) == (x[0], x[-1])
    assert (np.diff(thin_x) > 0).all()
    assert np.array_equal(y[thin_x], thin_y)
    assert (thin_y.min(), thin_y.max()) == (y.min(), y.max())


def test_smoothing_is_the_plain_mean_of_the_neighbours() -> None:
    rng = np.random.default_rng(0)
    y = rng.normal(size=1000)
    x, mean = smooth(np.arange(1000), y, points=50, share=0.02)
    assert len(x) == 50
    for at, value in zip(x, mean, strict=True):
        low, high = max(0, at - 10), min(1000, at + 11)
        assert value == pytest.approx(y[low:high].mean())


def test_smoothing_leaves_nan_out() -> None:
    x, mean = smooth(np.arange(4), np.array([1.0, np.nan, 3.0, np.nan]))
    assert (x.tolist(), mean.tolist()) == ([0, 2], [1.0, 3.0])


def test_the_clock_leaves_out_the_time_in_which_the_run_was_stopped() -> None:
    events = [{"kind": "start", "time": 100.0}, {"kind": "finish", "time": 130.0}, {"kind": "start", "time": 10_000.0}]
    clock = RunClock.of(events, [110.0, 120.0, 10_010.0, 10_050.0])
    assert clock.total_s == 30.0 + 50.0
    assert clock.seconds([100.0, 115.0, 130.0, 5_000.0, 10_000.0, 10_020.0]).tolist() == [0, 15, 30, 30, 30, 50]


def test_a_clock_of_nothing_stands_still() -> None:
    assert RunClock.of([], []).total_s == 0.0


def test_throughput_counts_every_sample_once() -> None:
    seconds, samples = np.linspace(20.0, 100.0, 400), np.arange(1, 401) * 64
    at, rate = throughput(seconds, samples, total_s=100.0, points=50)
    width = at[1] - at[0]
    assert (rate * width).sum() == pytest.approx(samples[-1] - samples[0])
    assert rate[0] == 0.0  # it was starting
