"""Workers die, hang, leave and join in place: survivors keep their processes, and nothing tells the result from a calm run's."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from raytrain_app.errors import TrainingError
from raytrain_app.storage.requests import Request, Requests
from tests.integration.elastic.disturbed import Disturbed, assert_undisturbed, kill_actor, slow_job
from tests.integration.elastic.slow_task import SLOWER_WHILE

pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture(scope="module")
def calm(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the undisturbed run, with one worker."""
    return Disturbed(slow_job(tmp_path_factory.mktemp("calm"), "calm", workers=1)).run()


def test_a_killed_worker_and_then_the_leader(tmp_path: Path, calm: dict[str, Any]) -> None:
    """Two deaths: of a follower at the end of an epoch, later of whoever leads; both are replaced, and no step is lost."""

    def kill_follower(run: Disturbed) -> None:
        SLOWER_WHILE.touch()
        run.kill(max(run.pids))

    def kill_leader(run: Disturbed) -> None:
        leader = min(run.pids)
        deadline_s = time.monotonic() + 120  # let the first replacement train, so that somebody takes over
        while len(run.seen("disruption")) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        run.kill(leader)

    job = slow_job(tmp_path, "killed", task="tests.integration.elastic.slow_task:SLOWER")
    all_are_there = {("join", 4): lambda _: SLOWER_WHILE.unlink()}
    run = Disturbed(job, {36: kill_follower, 37: kill_leader}, all_are_there)
    try:
        record = run.run()
    finally:
        SLOWER_WHILE.unlink(missing_ok=True)
    assert_undisturbed(run, record, calm)
    assert record["steps_redone"] == 0
    assert len(run.seen("worker_lost")) == 2
    assert {event["cause"] for event in run.seen("worker_lost")} == {"died"}
    crashes = [note for note in run.notes if note.startswith("crashes so far: ")]
    assert crashes == [f"crashes so far: {n} of the 20 that failure.max_restarts allows" for n in (1, 2)]
    receipts = record["disruptions"]
    assert [r["cause"] for r in receipts if r["cause"] == "worker_lost"] == ["worker_lost"] * 2
    assert all(r["workers_before"] == 2 and r["workers_after"] == 1 for r in receipts if r["cause"] == "worker_lost")
    assert any(r["cause"] == "join" for r in receipts)
    assert len(run.seen("join")) == 4, "two were there, two replaced others; nobody joined anew"
    assert 0 < record["goodput"] <= 1
    ends_s = {event["worker"]: event["time"] for event in run.seen("worker_lost")}
    last_s = run.seen("finish")[0]["time"]
    lived_s = sum(ends_s.get(e["worker"], last_s) - e["time"] + e["starting_s"] for e in run.seen("join"))
    assert sum(record["worker_seconds"].values()) == pytest.approx(lived_s, rel=0.01)


@pytest.mark.slow
def test_all_workers_lost_at_once_go_on_from_memory(tmp_path: Path) -> None:
    """Lost within the first epoch, before there is a checkpoint."""
    train = {"epochs": 3, "global_batch_size": 10, "virtual_shards": 4}
    calm = Disturbed(slow_job(tmp_path, "calm", workers=1, train=train)).run()
    run = Disturbed(slow_job(tmp_path, "lost", train=train), {70: lambda run: run.kill(*run.pids)})
    record = run.run()
    assert_undisturbed(run, record, calm)
    resumed = run.seen("resume")
    assert [event["source"] for event in resumed] == ["memory"]
    assert 0 < resumed[0]["step"] <= 90
    assert record["steps_redone"] < 90


@pytest.mark.slow
def test_a_large_model_whose_gradients_travel_while_they_are_computed(tmp_path: Path) -> None:
    """A follower, and then the leader, die in the middle of steps; their peers have segments under way."""
    changes: dict[str, Any] = {
        "model": {"name": "mlp", "hidden": 250_000, "batch_norm": True},
        "train": {"epochs": 3, "global_batch_size": 50, "virtual_shards": 4},
    }
    calm = Disturbed(slow_job(tmp_path, "calm", workers=1, **changes)).run()
    strikes = {9: lambda run: run.kill(max(run.pids)), 25: lambda run: run.kill(min(run.pids))}
    run = Disturbed(slow_job(tmp_path, "killed", **changes), strikes)
    record = run.run()
    assert_undisturbed(run, record, calm)
    assert len(run.seen("worker_lost")) == 2


@pytest.mark.slow
def test_a_hung_worker_is_evicted_and_replaced(tmp_path: Path, calm: dict[str, Any]) -> None:
    run = Disturbed(slow_job(tmp_path, "hung"), {60: lambda run: run.kill(max(run.pids), number=signal.SIGSTOP)})
    record = run.run()
    assert_undisturbed(run, record, calm)
    assert [event["cause"] for event in run.seen("worker_lost")] == ["silent"]
    assert record["steps_redone"] == 0
    lost = next(receipt for receipt in record["disruptions"] if receipt["cause"] == "worker_lost")
    assert lost["paused_s"] < lost["detected_s"] + 1, "the others wait until it is evicted, not until it is dead"


def test_scale_down_and_up_again_in_place(tmp_path: Path, calm: dict[str, Any]) -> None:
    def scale(most: int) -> Any:
        return lambda run: Requests(run.folder).post(Request(kind="scale", least=1, most=most))

    run = Disturbed(slow_job(tmp_path, "scaled", workers="1..3"), {40: scale(1), 90: scale(3)})
    record = run.run()
    assert_undisturbed(run, record, calm)
    assert [event["most"] for event in run.seen("scale")] == [1, 3]
    counts = [workers for _, workers in record["workers"]]
    assert counts[0] == 3
    assert 1 in counts
    assert counts[-1] == 3
    assert not run.seen("worker_lost")
    assert len(run.seen("join")) == 3, "workers that stepped aside came back; none was started anew"


@pytest.mark.slow
def test_deaths_of_the_membership_and_the_vault_are_not_noticed(tmp_path: Path, calm: dict[str, Any]) -> None:
    def kill_both(run: Disturbed) -> None:
        kill_actor("Membership")
        kill_actor("Vault")

    run = Disturbed(slow_job(tmp_path, "orphaned"), {50: kill_both, 150: lambda run: run.kill(max(run.pids))})
    record = run.run()
    assert_undisturbed(run, record, calm)


@pytest.mark.slow
def test_a_crash_that_comes_back_at_the_same_step_is_the_tasks(tmp_path: Path) -> None:
    job = slow_job(tmp_path, "crashing", task="tests.integration.elastic.slow_task:CRASHING", workers=1)
    run = Disturbed(job, {})
    started_s = time.monotonic()
    with pytest.raises(TrainingError, match="died 4 times without a step between"):
        run.run()
    assert time.monotonic() - started_s < 300
    assert run.folder.exists("result.json")
