"""Where a run stands: totals, early stopping, the clock of its records, and the seconds of its workers."""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_app.elastic.progress import UNDECIDED, Progress, Stopwatch, record_clock, steps_per_epoch
from raytrain_app.elastic.receipts import CLASSES
from raytrain_app.job import Job, job_from_dict


def make_job(epochs: int = 10, rule: dict[str, Any] | None = None) -> Job:
    train = {"epochs": epochs, "early_stopping": rule}
    return job_from_dict({"name": "unit", "task": "synthetic", "model": {"name": "linear"}, "train": train})


def epochs_until_stop(rule: dict[str, Any], values: list[float]) -> int:
    """Epochs that a run takes whose monitored metric goes through `values`."""
    progress, job = Progress(), make_job(len(values), rule)
    for value in values:
        if progress.finished(job):
            break
        progress.add_step(1.0, 1, 2)
        progress.end_epoch({"val_loss": value, "val_accuracy": value}, job)
    return progress.epoch


def test_an_epochs_metrics_are_means_over_its_rows() -> None:
    progress, job = Progress(), make_job()
    progress.add_step(8.0, 1, 4)
    progress.add_step(1.0, 2, 2)
    assert progress.end_epoch({"val_loss": 0.5}, job) == {"loss": 1.5, "accuracy": 0.5, "val_loss": 0.5}
    assert (progress.step, progress.epoch, progress.samples, progress.clock) == (2, 1, 6, 3)
    progress.add_step(3.0, 3, 3)
    assert progress.end_epoch({}, job) == {"loss": 1.0, "accuracy": 1.0}
    assert progress.samples == 9


def test_progress_survives_json_exactly() -> None:
    progress, job = Progress(), make_job(rule={"patience": 2})
    progress.add_step(0.1 + 0.2, 3, 7)
    progress.end_epoch({"val_loss": 1 / 3}, job)
    progress.add_step(1e-17, 1, 7)
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


@pytest.mark.parametrize(
    ("rule", "values", "epochs"),
    [
        ({"patience": 1}, [3.0, 2.0, 1.0], 3),
        ({"patience": 1}, [3.0, 3.0, 1.0], 2),
        ({"patience": 2}, [3.0, 4.0, 2.9, 3.0, 2.9, 1.0], 5),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.6, 1.0], 2),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.4, 1.0], 3),
        ({"patience": 1, "monitor": "val_accuracy"}, [0.1, 0.2, 0.2, 0.9], 3),
        ({"patience": 1, "monitor": "val_accuracy"}, [0.1, 0.2, 0.3, 0.4], 4),
    ],
)
def test_early_stopping_waits_for_a_gain(rule: dict[str, Any], values: list[float], epochs: int) -> None:
    assert epochs_until_stop(rule, values) == epochs


def test_slow_gains_add_up_against_the_best() -> None:
    """Each epoch gains less than min_delta, but two of them gain more: what counts is the distance to the best."""
    assert epochs_until_stop({"patience": 2, "min_delta": 0.5}, [3.0, 2.7, 2.4, 2.1, 1.8, 1.5]) == 6


def test_the_run_is_finished_after_its_epochs() -> None:
    progress, job = Progress(), make_job(epochs=1)
    assert not progress.finished(job)
    progress.add_step(1.0, 1, 1)
    assert not progress.finished(job)
    progress.end_epoch({}, job)
    assert progress.finished(job)


@given(st.integers(1, 20), st.integers(1, 5))
def test_records_have_the_clock_of_the_progress_they_tell(steps: int, epochs: int) -> None:
    progress, job, clocks = Progress(), make_job(epochs), []
    for epoch in range(1, epochs + 1):
        for _ in range(steps):
            progress.add_step(1.0, 1, 1)
            clocks.append(record_clock({"kind": "step", "step": progress.step, "epoch": epoch}))
            assert clocks[-1] == progress.clock
        progress.end_epoch({}, job)
        clocks.append(record_clock({"kind": "epoch", "step": progress.step, "epoch": epoch}))
        assert clocks[-1] == progress.clock
    assert clocks == list(range(1, epochs * (steps + 1) + 1))
    assert record_clock({"kind": "note"}) is None


@given(st.integers(1, 10_000), st.integers(1, 500))
def test_no_row_is_left_out_of_an_epoch(rows: int, batch: int) -> None:
    steps = steps_per_epoch(rows, batch)
    assert (steps - 1) * batch < rows <= steps * batch


def test_a_workers_seconds_add_up_to_its_lifetime() -> None:
    started_s, watch = time.monotonic(), Stopwatch()
    time.sleep(0.02)
    assert watch.switch("useful") >= 0.02
    time.sleep(0.03)
    watch.switch("idle", book="redone")
    time.sleep(0.01)
    seconds = watch.read()
    assert seconds["starting"] >= 0.02
    assert seconds["useful"] == 0.0
    assert seconds["redone"] >= 0.03
    assert seconds["idle"] >= 0.01
    assert sum(seconds.values()) == pytest.approx(time.monotonic() - started_s, abs=0.01)
    assert watch.seconds["idle"] == 0.0


def test_seconds_of_a_step_under_way_are_taken_back_from_no_class() -> None:
    """What was told of them stays true when the step is thrown away: no class ever shrinks."""
    watch = Stopwatch()
    watch.switch("useful")
    time.sleep(0.02)
    under_way = watch.read()
    watch.switch("idle", book="redone")
    after = watch.read()
    assert under_way[UNDECIDED] >= 0.02
    assert all(after[name] >= under_way[name] for name in CLASSES)
    assert after["redone"] >= 0.02
    watch.switch("useful")
    settled = watch.settle()
    assert settled[UNDECIDED] == 0.0
    assert sum(settled.values()) == pytest.approx(sum(watch.read().values()), abs=0.01)


def test_no_class_ever_shrinks_while_another_thread_reads() -> None:
    watch = Stopwatch()
    reads: list[dict[str, float]] = []
    reader = threading.Thread(target=lambda: reads.extend(watch.read() for _ in range(20_000)))
    reader.start()
    while reader.is_alive():
        watch.switch("idle")
        watch.switch("useful")
    reader.join()
    for before, after in itertools.pairwise(reads):
        assert all(after[name] >= before[name] for name in CLASSES)
