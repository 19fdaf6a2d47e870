"""The HTML reports."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from raytrain_app.errors import StorageError
from raytrain_app.report.comparison import MOST_RUNS, comparison_report, differences, names_of, rows, sentences
from raytrain_app.report.evaluations import path_of, read_evaluation
from raytrain_app.report.pages import gather, run_report
from raytrain_app.storage.folder import Folder
from tests.unit.report.making import START_S, events, make_run, metrics, result, status, write_lines

PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABc3UBGAAAAABJRU5ErkJggg=="
EVALUATION: dict[str, Any] = {
    "split": "test",
    "source": "mnist-sample",
    "checkpoint": "step-00000020",
    "weights_sha256": "ab" * 32,
    "rows": 9,
    "correct": 7,
    "loss": 0.25,
    "accuracy": 7 / 9,
    "metrics": {},
    "classes": [
        {"label": 0, "rows": 4, "precision": 1.0, "recall": 0.75, "f1": 6 / 7},
        {"label": 1, "rows": 5, "precision": 0.8, "recall": 0.8, "f1": 0.8},
        {"label": 2, "rows": 0, "precision": None, "recall": None, "f1": None},
    ],
    "confusion": [[3, 1, 0], [0, 4, 1], [0, 0, 0]],
    "mistakes": [
        {"row": 3, "label": 0, "prediction": 1, "probability": 0.99, "probability_of_label": 0.001, "image": PIXEL},
        {"row": 8, "label": 1, "prediction": 2, "probability": 0.6, "probability_of_label": 0.3, "image": None},
    ],
}


class Checker(HTMLParser):
    """Collects what a page would fetch, and whether its tags are closed."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "poster", "srcset") and not (value or "").startswith(("#", "data:")):
                self.fetched.append(f"{tag} {name}={value}")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without its start"
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def check(html: str) -> str:
    """Asserts that a page is whole and needs nothing else; returns its text."""
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert checker.fetched == []
    assert "@import" not in html
    assert not re.search(r"url\((?!data:)", html.replace("url(#", "url(data:"))
    return re.sub(r"\s+", " ", " ".join(checker.text))


def test_a_report_says_what_result_says(tmp_path: Path) -> None:
    ended = result(20)
    report = run_report(gather(make_run(tmp_path / "digits", 20, ended=ended), EVALUATION))
    text = check(report.html)
    for expected in ("digits", "finished", "95.00 %", "2 epochs, 20 steps and 640 samples", "on 2 to 3 workers", "87.0 %"):
        assert expected in text
    assert "1 disruption paused it for 0.25 s in all; 1 step was redone" in text
    assert "worker lost 3 → 2 0.10 s 0.25 s 1 0.50, 0.30" in text
    assert ended["weights_sha256"] in text
    assert "global_batch_size: 32" in text
    assert "77.78 %, 2 wrong; loss 0.25" in text
    assert "0 taken for 1 (1 of 4), 1 taken for 2 (1 of 5)" in text
    assert "0 taken for 1 99.0 % sure row 3" in text
    assert set(report.plots) == {"loss.png", "accuracy.png", "workers.png", "throughput.png", "confusion.png"}
    assert all(data.startswith(b"\x89PNG") for data in report.plots.values())


def test_a_run_under_way_has_a_report(tmp_path: Path) -> None:
    text = check(run_report(gather(make_run(tmp_path / "run", 13, now=status())), "It has not been evaluated.").html)
    assert "It has not ended" in text
    assert "It has not been evaluated." in text


def test_a_run_that_failed_at_once_has_a_report(tmp_path: Path) -> None:
    ended = {"status": "failed", "error": "the task raised <ValueError> & left", "samples_per_s": 0.0}
    text = check(run_report(gather(make_run(tmp_path / "run", 0, ended=ended, told=events()[:1]))).html)
    assert "the task raised <ValueError> & left" in text
    assert "no steps and no samples" in text


def test_nothing_from_a_run_becomes_part_of_the_page(tmp_path: Path) -> None:
    evil = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>'\""
    told = [*events(), {"kind": "checkpoint_failed", "time": START_S + 9, "error": evil}]
    folder = make_run(tmp_path / "run", 20, ended=result(20, error=evil, checkpoint=evil), told=told, task=evil)
    evaluation = {**EVALUATION, "source": evil, "mistakes": [{**EVALUATION["mistakes"][0], "image": f"{PIXEL}{evil}"}]}
    html = run_report(gather(folder, evaluation)).html
    assert html.count("<script>") == 1
    assert "<img src=x" not in html
    check(html)


def test_evaluations_are_found_and_damaged_ones_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert read_evaluation(folder) is None
    folder.write(path_of("validation"), json.dumps({**EVALUATION, "split": "validation"}).encode())
    assert (read_evaluation(folder) or {})["split"] == "validation"
    folder.write(path_of("test"), json.dumps(EVALUATION).encode())
    assert (read_evaluation(folder) or {})["split"] == "test"
    with pytest.raises(StorageError, match="evaluate it again"):
        run_report(gather(folder, {"rows": 3}))
    folder.write(path_of("test"), b"{")
    with pytest.raises(StorageError, match=r"evaluations/test\.json is damaged"):
        read_evaluation(folder)


def test_many_classes_are_told_in_words_instead_of_a_matrix(tmp_path: Path) -> None:
    classes = [{"label": n, "rows": 1, "precision": 1.0, "recall": 1.0, "f1": 1.0} for n in range(500)]
    report = run_report(gather(make_run(tmp_path / "run"), {**EVALUATION, "confusion": None, "classes": classes}))
    assert "confusion.png" not in report.plots
    check(report.html)


# ---- several runs ----


def test_runs_are_compared(tmp_path: Path) -> None:
    one = gather(make_run(tmp_path / "one", 20, ended=result(20)))
    two = gather(make_run(tmp_path / "two", 30, ended=result(30, test_accuracy=0.97), optimizer={"lr": 0.5}))
    table = {row.label: row for row in rows([one, two])}
    assert (table["test accuracy"].cells, table["test accuracy"].best) == (["95.00 %", "97.00 %"], [1])
    assert table["steps"].cells == ["20", "30"]
    assert table["test loss"].best == []
    assert differences([one, two]) == [["optimizer.lr", "0.001", "0.5"]]
    said = list(sentences([one, two]))
    assert said[0] == "All of them ended with the same weights, bit for bit."
    assert "The most accurate on test rows is two with 97.00 %" in said[1]
    text = check(comparison_report([one, two]).html)
    assert "optimizer.lr 0.001 0.5" in text


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    materials = [gather(make_run(tmp_path / folder / "run")) for folder in ("a", "b")]
    assert names_of(materials) == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_as_many_runs_as_there_are_colours(tmp_path: Path) -> None:
    materials = [gather(make_run(tmp_path / f"run{n}", 12)) for n in range(MOST_RUNS)]
    check(comparison_report(materials).html)


# ---- large runs ----


def test_a_million_steps_are_reported_in_seconds_and_megabytes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 0, ended=result(20))
    path = tmp_path / "run" / "metrics.jsonl"
    line = (
        '{{"kind": "step", "epoch": {epoch}, "step": {n}, "samples": {samples}, "loss": {loss:.12f}, "accuracy": {accuracy:.6f}, '
        '"lr": 0.002, "workers": 2, "time": {time:.6f}}}\n'
    )
    with path.open("w", encoding="utf-8") as file:
        for n in range(1, 1_000_001):
            loss = 2.0 / (1 + n / 1000) + (n * 7919 % 1000) / 1e4
            file.write(
                line.format(epoch=n // 10_000 + 1, n=n, samples=n * 64, loss=loss, accuracy=n % 97 / 97, time=START_S + n / 100)
            )
    write_lines(path, [{**metrics(10)[-1], "step": 1_000_000, "samples": 64_000_000, "epoch": 100}])
    started_s = time.process_time()
    report = run_report(gather(Folder.open(folder.uri)))
    assert time.process_time() - started_s < 10
    assert len(report.html) < 5_000_000
    assert "1,000,000 steps" in check(report.html)
