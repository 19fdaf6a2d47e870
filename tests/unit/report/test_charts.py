"""What the charts show, and that both kinds of picture show it."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain_app.report import drawing
from raytrain_app.report.charts import MOST_MARKS, Chart, Run, charts_of, charts_of_runs
from raytrain_app.report.confusion import confused_pairs, confusion_figure
from raytrain_app.report.history import RunClock
from raytrain_app.report.pages import gather
from tests.unit.report.making import RECEIPT, START_S, events, make_run, result


def run_of(tmp_path: Path, steps: int = 20, **options: Any) -> Run:
    return gather(make_run(tmp_path / "run", steps, **options)).run


def test_charts_hold_the_numbers_of_the_run(tmp_path: Path) -> None:
    charts = {chart.name: chart for chart in charts_of(run_of(tmp_path, 20, ended=result(20)))}
    assert list(charts) == ["loss", "accuracy", "workers", "throughput"]
    raw, train, validation = charts["loss"].series
    assert raw.y.tolist() == [2.0 * 0.9**number for number in range(1, 21)]
    assert train.x.tolist() == list(range(1, 21))
    assert (validation.x.tolist(), validation.y.tolist()) == ([10, 20], [1.0, 0.5])
    assert charts["workers"].series[0].y.tolist() == [0, 3, 2, 2]
    assert [mark.color for mark in charts["workers"].marks] == ["bad"]
    assert charts["workers"].marks[0].x == pytest.approx(8.0)
    assert charts["throughput"].series[0].y.max() == pytest.approx(64, rel=0.01)


def test_loss_that_falls_far_has_a_logarithmic_axis(tmp_path: Path) -> None:
    assert {chart.name: chart.log for chart in charts_of(run_of(tmp_path, 60))}["loss"]
    assert not {chart.name: chart.log for chart in charts_of(run_of(tmp_path / "short", 5))}["loss"]


def test_of_many_disruptions_the_worst_of_each_stretch_is_marked(tmp_path: Path) -> None:
    receipts = [{**RECEIPT, "time": START_S + 3 + n / 200, "paused_s": 9.0 if n == 777 else 0.1} for n in range(2000)]
    told = [*events()[:5], *({"kind": "disruption", "time": r["time"], "receipt": r} for r in receipts)]
    chart = next(chart for chart in charts_of(run_of(tmp_path, 40, told=told)) if chart.name == "workers")
    assert 10 < len(chart.marks) <= MOST_MARKS
    assert any("9.00 s" in mark.label for mark in chart.marks)


def test_a_run_that_never_took_a_step_has_a_chart_of_workers_only(tmp_path: Path) -> None:
    assert [chart.name for chart in charts_of(run_of(tmp_path, 0, told=events()[:1]))] == ["workers"]


@pytest.mark.parametrize("steps", [1, 2, 3, 20, 61])
def test_every_chart_can_be_drawn_both_ways(tmp_path: Path, steps: int) -> None:
    run = run_of(tmp_path, steps)
    for chart in [*charts_of(run), *charts_of_runs([run, run])]:
        assert drawing.png(chart, 40).startswith(b"\x89PNG")
        svg = drawing.svg(chart)
        assert svg.startswith("<svg viewBox=")
        assert svg.endswith("</svg>")


def test_colours_of_the_page_and_nothing_else(tmp_path: Path) -> None:
    svg = "".join(drawing.svg(chart) for chart in charts_of(run_of(tmp_path)))
    assert re.findall(r"#[0-9a-f]{6}\b", svg) == []
    assert "var(--train)" in svg
    for forbidden in ("<style", "<script", "<metadata", "<!--", "font-family", 'href="http'):
        assert forbidden not in svg


def test_values_under_the_pointer_are_those_of_the_chart() -> None:
    from raytrain_app.report.charts import Mark, Series

    x, y = np.array([0.0, 10.0, 20.0]), np.array([1.0, 0.123456789, 0.5])
    chart = Chart("c", "A <b> 'title'", "step", "y", (Series("it's", "train", x, y),), marks=(Mark(5.0, "bad", "lost & found"),))
    svg = drawing.svg(chart)
    found = re.search(r"data-hover='([^']*)'", svg)
    assert found is not None
    hover = json.loads(unescape(found[1]))
    assert hover["series"][0]["y"] == [1.0, 0.12346, 0.5]
    assert hover["series"][0]["label"] == "it's"
    assert hover["marks"] == [{"x": 5.0, "label": "lost & found", "color": "bad"}]
    left, right, top, bottom = hover["box"]
    assert 0 <= left < right <= drawing.WIDTH_IN * 72
    assert 0 <= top < bottom <= drawing.HEIGHT_IN * 72
    assert "<b>" not in svg


def test_confusion_in_a_picture_and_in_words() -> None:
    counts = np.array([[5, 1, 0], [0, 7, 3], [0, 0, 0]])
    assert drawing.save_png(confusion_figure(counts, page=False), 40).startswith(b"\x89PNG")
    svg = drawing.save_svg(confusion_figure(counts, page=True), "Confusion matrix")
    assert svg.count("opacity: ") == 4
    assert confused_pairs(counts) == "1 taken for 2 (3 of 10), 0 taken for 1 (1 of 6)"
    assert confused_pairs(np.diag([1, 2])) == ""


def test_a_run_stopped_for_a_day_shows_no_day() -> None:
    from raytrain_app.report.charts import workers
    from raytrain_app.report.history import parse_history

    told = [
        {"kind": "start", "time": 0.0},
        {"kind": "generation", "time": 10.0, "workers": 4},
        {"kind": "finish", "time": 60.0},
        {"kind": "start", "time": 90_000.0},
        {"kind": "generation", "time": 90_010.0, "workers": 2},
        {"kind": "finish", "time": 90_050.0},
    ]
    series = workers(Run("r", parse_history(b"", ""), told, RunClock.of(told, []))).series[0]
    assert series.x.tolist() == [0, 10, 60, 70, 110]
    assert series.y.tolist() == [0, 4, 0, 2, 2]
