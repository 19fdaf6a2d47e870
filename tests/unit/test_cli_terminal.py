"""What a run looks like on a terminal and in a log."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from raytrain_app.report.terminal import Rate, next_lines, result_lines, shown, step_text
from raytrain_app.report.updates import Update

STEP: dict[str, Any] = {
    "kind": "step",
    "epoch": 2,
    "step": 210,
    "total_steps": 342,
    "samples": 13440,
    "loss": 0.21304,
    "accuracy": 0.9375,
    "lr": 0.002,
    "workers": 2,
    "time": 1000.0,
}
EPOCH = {**STEP, "kind": "epoch", "val_loss": 0.18, "val_accuracy": 0.951, "workers": 1}
RESULT: dict[str, Any] = {
    "status": "early_stopped",
    "epochs": 3,
    "steps": 1342,
    "samples": 21600,
    "train_loss": 0.1,
    "val_loss": 0.2,
    "val_accuracy": 0.95,
    "test_loss": 0.19,
    "test_accuracy": 0.9612,
    "weights_sha256": "ab" * 32,
    "disruptions": [],
    "steps_redone": 0,
    "pause_s": [],
    "wall_s": 12.34,
    "samples_per_s": 21_600 / 12.34,
    "checkpoint": "checkpoints/step-00000200",
}


def updates() -> Iterator[Update]:
    yield Update("phase", "starting 2 workers")
    yield Update("note", "the data has no test rows [of any kind]")
    for step in range(1, 343):
        yield Update("step", record={**STEP, "epoch": 1 + step // 115, "step": step, "samples": step * 64, "time": step * 0.01})
    yield Update("event", "", {"kind": "checkpoint"})
    yield Update("event", "worker 1 was lost; 1 worker goes on", {"kind": "worker_lost"})
    yield Update("epoch", record=EPOCH)
    yield Update("phase", "evaluating")


def print_updates(console: Console, quiet: bool = False) -> str:
    with shown(quiet=quiet, epochs=3, console=console) as show:
        for update in updates():
            show(update)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_gets_plain_lines_without_the_steps() -> None:
    printed = print_updates(Console(file=io.StringIO(), width=40))
    assert printed.splitlines() == [
        "starting 2 workers",
        "the data has no test rows [of any kind]",
        "worker 1 was lost; 1 worker goes on",
        "epoch 2/3  loss 0.2130  acc 0.9375  val_loss 0.1800  val_acc 0.9510  1 worker",
        "evaluating",
    ]


def test_a_log_gets_a_step_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_app.report.terminal.LINE_EVERY_S", 0.0)
    lines = print_updates(Console(file=io.StringIO(), width=40)).splitlines()
    assert lines[2] == "epoch 1/3  step 1/342  loss 0.2130  acc 0.9375  2 workers"
    assert lines[343] == "epoch 3/3  step 342/342  loss 0.2130  acc 0.9375  6,400 samples/s  2 workers"


def test_quiet_prints_nothing() -> None:
    assert print_updates(Console(file=io.StringIO()), quiet=True) == ""
    assert print_updates(Console(file=io.StringIO(), force_terminal=True), quiet=True) == ""


def test_a_terminal_gets_a_bar_and_keeps_what_matters() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    printed = print_updates(console)
    for kept in (
        "the data has no test rows [of any kind]\n",
        "worker 1 was lost; 1 worker goes on\n",
        "epoch 2/3  loss 0.2130  acc 0.9375  val_loss 0.1800  val_acc 0.9510  1 worker\n",
    ):
        assert printed.count(kept) == 1


def test_the_bar_shows_where_the_run_is() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with shown(quiet=False, epochs=3, console=console) as show:
        show(Update("phase", "starting 2 workers"))
        show(Update("step", record={**STEP, "samples": 0, "time": 998.0}))
        show(Update("step", record=STEP))
        show(Update("note", "drawn now"))
    assert isinstance(console.file, io.StringIO)
    bar = next(line for line in console.file.getvalue().splitlines() if "samples/s" in line)
    assert "epoch 2/3 ━" in bar
    assert "loss 0.213 acc 0.938 6,720 samples/s 2 workers" in bar


def test_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate(window_s=5.0)
    assert rate.add(0.0, 0) is None
    assert rate.add(1.0, 100) == 100.0
    for second in range(2, 20):
        last = rate.add(float(second), 100 + (second - 1) * 10)
    assert last == 10.0


def test_rate_starts_anew_when_the_count_does() -> None:
    rate = Rate()
    rate.add(0.0, 1000)
    rate.add(1.0, 2000)
    assert rate.add(2.0, 1500) is None
    assert rate.add(3.0, 1600) == 100.0


def test_step_text_leaves_out_what_is_not_there() -> None:
    record = {**STEP, "accuracy": None}
    assert step_text(record, 3, 8412.4) == "epoch 2/3  step 210/342  loss 0.2130  8,412 samples/s  2 workers"


def test_result_is_an_aligned_table() -> None:
    assert result_lines(RESULT, "runs/t") == [
        "status               early stopped",
        "test accuracy        0.9612",
        "test loss            0.1900",
        "validation accuracy  0.9500",
        "validation loss      0.2000",
        "training loss        0.1000",
        "epochs, steps        3, 1,342",
        "samples              21,600 in 12.3 s, 1,750 a second",
        f"weights sha256       {'ab' * 32}",
        "best checkpoint      checkpoints/step-00000200",
        "run directory        runs/t",
    ]


def test_result_of_a_resumed_run_tells_what_was_done_in_its_time() -> None:
    resumed = {**RESULT, "samples_per_s": 600.0, "wall_s": 10.0}
    assert "samples              21,600, of them 6,000 in 10.0 s, 600 a second" in result_lines(resumed, "runs/t")


def test_result_leaves_out_what_was_not_measured() -> None:
    nothing = dict.fromkeys(("val_loss", "val_accuracy", "test_loss", "test_accuracy", "checkpoint", "weights_sha256"))
    labels = [line.split("  ")[0] for line in result_lines({**RESULT, **nothing}, "runs/t")]
    assert labels == ["status", "training loss", "epochs, steps", "samples", "run directory"]


def test_result_tells_of_disruptions() -> None:
    disrupted = {**RESULT, "disruptions": [{}, {}], "steps_redone": 1, "pause_s": [0.4, 1.26]}
    assert "disruptions          2, 1 steps redone, longest pause 1.3 s" in result_lines(disrupted, "runs/t")


@pytest.mark.parametrize(
    ("directory", "storage", "named"),
    [("/home/me/runs/my run", "runs", "'my run'"), ("gs://bucket/all/digits", "gs://bucket/all", "gs://bucket/all/digits")],
)
def test_after_the_result_comes_what_to_do_with_the_run(directory: str, storage: str, named: str) -> None:
    lines = next_lines(directory, storage)
    assert lines[1].startswith(f"  raytrain report {named} ")
    assert lines[-1].startswith(f"  raytrain predict {named} IMAGE   # ")
