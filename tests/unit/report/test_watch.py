"""The watching terminal."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from raytrain_app.report.curves import Curve, plot
from raytrain_app.report.happenings import sentence
from raytrain_app.report.screen import lines_of, screen
from raytrain_app.report.watch import Trace, views, watch
from tests.unit.report.making import START_S, events, make_run, metrics, result, status, step, write_lines


def shown(view: object, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None, force_terminal=True)
    with console.capture() as capture:
        console.print(screen(view, width, height))  # type: ignore[arg-type]
    return capture.get().splitlines()


def test_the_end_of_a_run_shows_the_numbers_of_its_result(tmp_path: Path) -> None:
    ended = result(20)
    *_, last = views(make_run(tmp_path / "digits", 20, ended=ended))
    text = "\n".join(shown(last, 110, 40))
    assert "digits" in text
    assert "finished" in text
    for name in ("val_loss", "test_loss"):
        assert f"{name} {ended[name]:.4f}" in text
    assert "test_acc 0.9500" in text
    assert "64 samples/s" in text
    assert "0.2-abcdef" in text
    assert "worker lost: 3 to 2 workers, paused 0.25 s" in text


@pytest.mark.parametrize(("width", "height"), [(60, 12), (80, 24), (100, 40), (200, 60)])
def test_it_fits_any_terminal(tmp_path: Path, width: int, height: int) -> None:
    for view in views(make_run(tmp_path / "run", 25, ended=result(25)), replay_s=0.5):
        lines = shown(view, width, height)
        assert max(map(len, lines)) <= width
        assert len(lines) < height or height < 20


def test_a_replay_goes_through_the_run_and_ends_at_its_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 30, ended=result(30))
    frames = list(views(folder, replay_s=1.0))
    steps = [frame.state.step for frame in frames]
    assert steps == sorted(steps)
    assert steps[0] < 10
    assert steps[-1] == 30
    assert {frame.state.status for frame in frames[:-1]} == {"replay"}
    middle = next(frame for frame in frames if frame.state.step >= 14)
    assert [member.state for member in middle.state.members] == ["training", "training", "lost"]
    assert middle.state.metrics["val_loss"] == 1.0


def test_a_running_run_is_followed_to_its_end(tmp_path: Path) -> None:
    folder, path = make_run(tmp_path / "run", 5, now=status(time=time.time())), tmp_path / "run"

    def train() -> None:
        for number in range(6, 21):
            write_lines(path / "metrics.jsonl", [step(number, time=time.time())])
            folder.write("status.json", json.dumps(status(time=time.time())).encode())
            time.sleep(0.02)
        folder.write("result.json", json.dumps(result(20)).encode())

    writer = threading.Thread(target=train)
    writer.start()
    try:
        seen = list(views(folder))
    finally:
        writer.join()
    assert seen[-1].state.status == "finished"
    assert seen[-1].state.step == 20
    assert seen[-1].train["loss"][0].tolist() == list(range(1, 21))


def test_what_is_watched_stays_on_the_terminal(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, height=30, force_terminal=True)
    state = watch(make_run(tmp_path / "run", 20, ended=result(20)), console, replay_s=0.0)
    assert state.status == "finished"
    alternate, _, after = file.getvalue().partition("\x1b[?1049l")
    assert "\x1b[?1049h" in alternate
    assert "finished" in after


def test_plain_lines_for_logs(tmp_path: Path) -> None:
    lines = list(lines_of(views(make_run(tmp_path / "run", 20, ended=result(20))), 5.0))
    assert any("lost worker 0.2-abcdef (died)" in line for line in lines)
    assert lines[-1].startswith("finished  epoch 2/3  step 20")


def test_every_event_of_a_disturbed_run_has_its_sentence() -> None:
    told = {event["kind"]: sentence(event) for event in events()}
    assert told["start"] == "started with 3 workers"
    assert told["worker_lost"] == "lost worker 0.2-abcdef (died)"
    assert told["disruption"] == "worker lost: 3 to 2 workers, paused 0.25 s"
    assert told["checkpoint"] == told["generation"] == ""
    assert sentence({"kind": "server_lost", "server": 1}) == "lost parameter server 1; another one has its state"
    back = {"kind": "roll_back", "step": 1100, "steps": 3, "samples": 192}
    assert sentence(back) == "a part of a step was lost with all who had it; the servers went back 3 steps, to 1,100"
    reshard = {"kind": "reshard", "servers": 2, "seconds": 0.242}
    assert sentence(reshard) == "parameters on 2 servers now, 0.24 s after it was asked"
    assert sentence({"kind": "something_new"}) == ""


# ---- curves ----


@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50),
    st.integers(10, 60),
    st.integers(1, 12),
    st.booleans(),
)
def test_curves_fill_exactly_their_place(values: list[float], width: int, height: int, log: bool) -> None:
    text = plot([Curve(np.arange(len(values)), np.array(values), "blue")], width, height, log=log)
    lines = text.plain.split("\n")
    assert len(lines) == height
    assert max(map(len, lines)) <= width


def test_a_rising_line_rises_without_a_gap() -> None:
    lines = plot([Curve(np.arange(9), np.arange(9.0) ** 3, "blue")], 28, 6).plain.split("\n")
    marks = [[column for column, char in enumerate(line[8:]) if char != " "] for line in lines]
    assert all(marks), "every line of text has a part of the curve"
    assert [row[0] for row in marks] == sorted((row[0] for row in marks), reverse=True)
    assert lines[0].strip().startswith("512")
    assert lines[-1].strip().startswith("0")


@given(st.integers(1, 20_000))
def test_a_trace_stays_short_and_keeps_the_mean(count: int) -> None:
    trace = Trace(limit=200)
    for number in range(count):
        trace.add(number, 3.0)
    assert len(trace.x) < 200
    assert set(trace.y) <= {3.0}
    assert not trace.x or trace.x[-1] <= count


def test_a_trace_that_starts_from_history_goes_on_as_one_that_saw_it_all() -> None:
    rng = np.random.default_rng(0)
    y = rng.normal(size=40_000)
    trace = Trace.of(np.arange(30_000), y[:30_000])
    for number in range(30_000, 40_000):
        trace.add(number, float(y[number]))
    assert len(trace.x) < trace.limit
    assert np.mean(trace.y) == pytest.approx(y.mean(), abs=0.01)
    assert (np.diff(trace.x) > 0).all()


def test_metrics_lines_survive_the_way_through_columns(tmp_path: Path) -> None:
    from raytrain_app.report.history import read_history
    from raytrain_app.report.watch import _records
    from raytrain_app.storage.rundir import RunDirectory

    history = read_history(RunDirectory(make_run(tmp_path / "run", 10)))
    assert _records(history, slice(None)) == metrics(10)
    assert START_S


def test_parameter_servers_are_shown_while_they_serve(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 10, told=events()[:1], now=status())
    line = {"servers": 2, "rounds_per_s": 1234.5, "staleness_median": 1, "staleness_p95": 3, "staleness_max": 7, "refused": 4}
    more = {"lost": 0, "in_bytes_per_s": 2_500_000, "out_bytes_per_s": 5_000_000}
    live = views(folder)
    next(live)
    write_lines(tmp_path / "run" / "metrics.jsonl", [{"kind": "servers", "time": START_S + 9, "step": 10, **line, **more}])
    text = "\n".join(shown(next(live), 140, 40))
    assert "servers 2  gradients/s 1,234  staleness median 1  95 % 3  most 7  refused 4  lost 0  MB/s in 2.5  out 5.0" in text
