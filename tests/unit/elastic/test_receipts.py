"""Receipts: one for every disruption, with what it cost."""

from __future__ import annotations

from typing import Any

from raytrain_app.elastic.receipts import Receipts

SECONDS = {"useful": 10.0, "redone": 0.0, "starting": 4.0, "idle": 0.0}


class Stream:
    """Events and steps of a run, in the order in which the driver gets them."""

    def __init__(self) -> None:
        self.receipts = Receipts()

    def event(self, kind: str, time_s: float, **details: Any) -> None:
        self.receipts.event({"kind": kind, "time": time_s, **details})

    def step(self, step: int, time_s: float, seconds: dict[str, float] | None = None) -> dict[str, Any] | None:
        return self.receipts.step({"kind": "step", "step": step, "samples": 64 * step, "time": time_s}, seconds or SECONDS)


def running(workers: int = 2) -> Stream:
    """A run that has taken ten steps, one every 0.1 s up to the time 1.0."""
    stream = Stream()
    for number in range(workers):
        stream.event("join", 0.0, worker=f"0.{number}")
    stream.event("generation", 0.0, workers=workers)
    assert [stream.step(step, step / 10) for step in range(1, 11)] == [None] * 10
    return stream


def test_a_start_is_no_disruption() -> None:
    assert running().receipts.given == []


def test_a_lost_worker_costs_the_gap_between_two_steps() -> None:
    stream = running()
    stream.event("worker_lost", 1.2, worker="0.1", cause="died")
    stream.event("generation", 1.3, workers=1)
    after = {**SECONDS, "useful": 10.5, "redone": 0.25}
    assert stream.step(11, 1.5, after) == {
        "cause": "worker_lost",
        "time": 1.2,
        "detected_s": 0.2,
        "paused_s": 0.5,
        "steps_redone": 0,
        "samples_redone": 0,
        "workers_before": 2,
        "workers_after": 1,
        "worker_seconds": {"useful": 0.5, "redone": 0.25, "starting": 0.0, "idle": 0.0},
    }
    assert stream.step(12, 1.6) is None
    assert len(stream.receipts.given) == 1


def test_steps_that_came_before_the_generation_do_not_end_it() -> None:
    stream = running()
    stream.event("worker_lost", 1.2, worker="0.1", cause="died")
    stream.event("generation", 1.3, workers=1)
    assert stream.step(11, 1.1) is None
    receipt = stream.step(12, 1.5)
    assert receipt is not None
    assert receipt["workers_after"] == 1


def test_a_return_to_a_checkpoint_counts_what_is_done_again() -> None:
    stream = running()
    stream.event("node_lost", 1.1, worker="0.0")
    stream.event("node_lost", 1.1, worker="0.1")
    stream.event("join", 5.0, worker="1.0")
    stream.event("generation", 5.0, workers=1)
    stream.event("resume", 5.1, step=6, samples=64 * 6, source="checkpoint")
    receipt = stream.step(11, 6.0)
    assert receipt is not None
    assert (receipt["cause"], receipt["steps_redone"], receipt["samples_redone"]) == ("node_lost", 4, 256)
    assert (receipt["workers_before"], receipt["workers_after"]) == (2, 1)
    stream.event("join", 7.0, worker="1.1")
    stream.event("generation", 7.0, workers=2)
    later = stream.step(12, 7.1)
    assert later is not None
    assert (later["cause"], later["steps_redone"]) == ("join", 0)


def test_faults_while_a_generation_forms_are_one_disruption() -> None:
    stream = running(workers=3)
    stream.event("worker_lost", 1.1, worker="0.2", cause="died")
    stream.event("generation", 1.2, workers=2)
    stream.event("worker_lost", 1.3, worker="0.1", cause="died")
    stream.event("generation", 1.4, workers=1)
    receipt = stream.step(11, 1.5)
    assert receipt is not None
    assert (receipt["workers_before"], receipt["workers_after"], receipt["paused_s"]) == (3, 1, 0.5)
    assert stream.receipts.given == [receipt]


def test_steps_that_servers_went_back_count_though_nobody_was_told_of_them() -> None:
    stream = running()
    stream.event("worker_lost", 1.1, worker="0.1", cause="died")
    stream.event("generation", 1.2, workers=1)
    stream.event("roll_back", 1.6, step=10, steps=3, samples=192)
    stream.event("generation", 1.6, workers=1)
    receipt = stream.step(11, 1.8)
    assert receipt is not None
    assert (receipt["cause"], receipt["steps_redone"], receipt["samples_redone"]) == ("worker_lost", 3, 192)
    stream.event("join", 2.0, worker="0.2")
    stream.event("generation", 2.0, workers=2)
    later = stream.step(12, 2.1)
    assert later is not None
    assert (later["steps_redone"], later["samples_redone"]) == (0, 0)


def test_going_on_from_a_checkpoint_at_the_start_is_no_part_of_a_later_disruption() -> None:
    stream = Stream()
    stream.event("resume", 0.0, step=113, source="checkpoint")
    stream.event("join", 0.0, worker="0.0")
    stream.event("generation", 0.0, workers=1)
    assert stream.step(114, 0.1) is None
    stream.event("join", 0.2, worker="0.1")
    stream.event("generation", 0.2, workers=2)
    receipt = stream.step(115, 0.3)
    assert receipt is not None
    assert (receipt["cause"], receipt["steps_redone"], receipt["samples_redone"]) == ("join", 0, 0)


def test_the_gravest_cause_names_the_disruption() -> None:
    stream = running()
    stream.event("join", 1.05, worker="0.2")
    stream.event("worker_lost", 1.1, worker="0.1", cause="died")
    stream.event("generation", 1.2, workers=2)
    receipt = stream.step(11, 1.3)
    assert receipt is not None
    assert receipt["cause"] == "worker_lost"
    assert receipt["time"] == 1.1


def test_each_change_of_a_calm_run_has_its_own_receipt() -> None:
    stream = running()
    for number, kind in enumerate(["join", "leave", "drain"], start=1):
        stream.event(kind, 1.0 + number, worker="0.9")
        stream.event("generation", 1.0 + number, workers=2 + number)
        assert stream.step(10 + number, 1.1 + number) is not None
    assert [receipt["cause"] for receipt in stream.receipts.given] == ["join", "leave", "drain"]
    assert [receipt["workers_after"] for receipt in stream.receipts.given] == [3, 4, 5]
