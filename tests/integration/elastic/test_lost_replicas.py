"""Workers of replicas in parts die, leave and join: a replica goes and comes as a whole, and the result is a calm run's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from raytrain_app.job import Job
from raytrain_app.storage.requests import Request, Requests
from tests.integration.elastic.disturbed import Disturbed, assert_undisturbed, slow_job

pytestmark = [pytest.mark.usefixtures("ray_local"), pytest.mark.slow]


def parts_job(storage: Path, name: str, workers: int | str) -> Job:
    """Replicas of two workers, two of them at most."""
    return slow_job(
        storage,
        name,
        workers=workers,
        model={"name": "mlp", "dropout": 0.2},
        train={"epochs": 15, "global_batch_size": 50, "virtual_shards": 4, "clip_norm": 1.0},
        strategy={"name": "model_parallel", "fsdp": 2},
    )


@pytest.fixture(scope="module")
def calm(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the undisturbed run, with one replica."""
    return Disturbed(parts_job(tmp_path_factory.mktemp("calm"), "calm", 2)).run()


def test_a_lost_worker_takes_its_replica_out_until_it_is_replaced(tmp_path: Path, calm: dict[str, Any]) -> None:
    """Two deaths in one replica, one after the other, and then one in the other."""

    def kill_second(run: Disturbed) -> None:
        run.kill(max(run.pids))

    def kill_first(run: Disturbed) -> None:
        deadline_s = time.monotonic() + 120
        while len(run.seen("join")) < 6 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        time.sleep(1.0)
        run.kill(min(run.pids))

    run = Disturbed(parts_job(tmp_path, "killed", 4), {30: kill_second, 60: kill_second, 61: kill_first})
    record = run.run()
    assert_undisturbed(run, record, calm)
    assert record["steps_redone"] == 0
    assert {event["cause"] for event in run.seen("worker_lost")} == {"died"}


def test_a_single_replica_that_loses_a_worker_goes_on_from_memory(tmp_path: Path, calm: dict[str, Any]) -> None:
    run = Disturbed(parts_job(tmp_path, "lost", 2), {100: lambda run: run.kill(max(run.pids))})
    record = run.run()
    assert_undisturbed(run, record, calm)
    assert [event["source"] for event in run.seen("resume")] == ["memory"]
    assert run.seen("resume")[0]["step"] > 0


def test_scale_removes_and_adds_replicas(tmp_path: Path, calm: dict[str, Any]) -> None:
    def scale(most: int) -> Any:
        return lambda run: Requests(run.folder).post(Request(kind="scale", least=2, most=most))

    run = Disturbed(parts_job(tmp_path, "scaled", "2..4"), {30: scale(2), 60: scale(4)})
    record = run.run()
    assert_undisturbed(run, record, calm)
    assert record["steps_redone"] == 0
    assert {count for _, count in record["workers"]} == {2, 4}
    assert len(run.seen("leave")) == 2
