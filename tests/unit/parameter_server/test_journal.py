"""The story is told in order, epoch by epoch, and survives a restart in the middle."""

from __future__ import annotations

import json

from raytrain_app.elastic.progress import record_clock
from raytrain_app.job import job_from_dict
from raytrain_app.strategies.parameter_server.journal import Journal
from raytrain_app.strategies.parameter_server.ledger import Outcome

JOB = job_from_dict({"name": "j", "task": "mnist", "model": {"name": "linear"}, "train": {"epochs": 2}})


def outcome(loss: float, rows: int = 2, ids: tuple[int, ...] = ()) -> Outcome:
    return Outcome("w", loss, 1, rows, [loss], 0.1, 3, list(ids), 100.0 + loss)


def test_a_fast_workers_next_epoch_is_told_after_this_one() -> None:
    journal = Journal(JOB)
    journal.add(0, [outcome(1.0)], 2)
    journal.add(1, [outcome(5.0)], 2)
    journal = Journal.from_json(JOB, json.loads(json.dumps(journal.to_json())))
    journal.add(0, [outcome(3.0)], 2)
    metrics = journal.close_epoch({"val_loss": 0.5}, 0.1, 2, 200.0)
    assert metrics == {"loss": 1.0, "accuracy": 0.5, "val_loss": 0.5}
    records = [record for _, record in journal.records]
    assert [(r["kind"], r["epoch"], r["step"], r["loss"]) for r in records] == [
        ("step", 1, 1, 0.5),
        ("step", 1, 2, 1.5),
        ("epoch", 1, 2, 1.0),
        ("step", 2, 3, 2.5),
    ]
    assert [clock for clock, _ in journal.records] == [record_clock(r) for r in records] == [1, 2, 3, 4]
    assert records[0]["staleness"] == 3
    assert "ids" not in records[0]


def test_parts_of_a_step_make_one_line() -> None:
    journal = Journal(JOB)
    journal.add(0, [outcome(1.0, 2, (7, 8)), outcome(2.0, 4, (9,))], 2)
    (_, record) = journal.records[0]
    assert (record["loss"], record["accuracy"], record["samples"], record["time"]) == (0.5, 2 / 6, 6, 102.0)
    assert record["ids"] == [7, 8, 9]


def test_what_the_driver_has_is_forgotten() -> None:
    journal = Journal(JOB)
    for number in range(4):
        journal.add(0, [outcome(float(number))], 1)
    journal.forget(2)
    assert [clock for clock, _ in journal.records] == [3, 4]
