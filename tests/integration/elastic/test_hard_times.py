"""Faults at the worst moments, and many of them; each run must end as the calm one does."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain_app.storage.folder import Folder
from raytrain_app.storage.requests import Request, Requests
from raytrain_app.storage.rundir import RunDirectory
from tests.integration.elastic.disturbed import Disturbed, assert_undisturbed, slow_job
from tests.integration.elastic.far_machine import lacking
from tests.integration.elastic.slow_task import STUCK_ONCE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def calm(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the undisturbed run, with one worker."""
    return Disturbed(slow_job(tmp_path_factory.mktemp("calm"), "calm", workers=1)).run()


def newest(run: Disturbed) -> str:
    """The worker that joined last."""
    return str(run.seen("join")[-1]["worker"])


@pytest.mark.usefixtures("ray_local")
def test_two_at_once(tmp_path: Path, calm: dict[str, Any]) -> None:
    run = Disturbed(slow_job(tmp_path, "two", workers=3), {50: lambda run: run.kill(*sorted(run.pids)[1:])})
    assert_undisturbed(run, run.run(), calm)


@pytest.mark.usefixtures("ray_local")
def test_a_newcomer_dies_while_it_is_taken_in(tmp_path: Path, calm: dict[str, Any]) -> None:
    run = Disturbed(
        slow_job(tmp_path, "newcomer"),
        {40: lambda run: run.kill(max(run.pids))},
        on_event={("join", 3): lambda run: run.kill(newest(run))},
    )
    assert_undisturbed(run, run.run(), calm)


@pytest.mark.usefixtures("ray_local")
def test_the_leader_dies_while_it_hands_its_state_over(tmp_path: Path, calm: dict[str, Any]) -> None:
    """With the only one that has state gone, the newcomer goes on from memory."""
    run = Disturbed(
        slow_job(tmp_path, "leader"),
        {40: lambda run: run.kill(max(run.pids))},
        on_event={("join", 3): lambda run: run.kill(min(run.pids))},
    )
    assert_undisturbed(run, run.run(), calm)


@pytest.mark.usefixtures("ray_local")
def test_a_death_while_checkpoints_are_written(tmp_path: Path, calm: dict[str, Any]) -> None:
    job = slow_job(tmp_path, "checkpoints", checkpoint={"every_steps": 1, "keep": 2})
    run = Disturbed(job, {50: lambda run: run.kill(*run.pids), 120: lambda run: run.kill(min(run.pids))})
    assert_undisturbed(run, run.run(), calm)


@pytest.mark.usefixtures("ray_local")
def test_a_worker_that_lives_but_never_ends_its_step(tmp_path: Path, calm: dict[str, Any]) -> None:
    """Its heartbeats go on; the others have waited in vain for twice `failure.heartbeat_s`, and then once more for it to come."""
    STUCK_ONCE.unlink(missing_ok=True)
    run = Disturbed(slow_job(tmp_path, "stuck", task="tests.integration.elastic.slow_task:STUCK"))
    record = run.run()
    STUCK_ONCE.unlink()
    assert_undisturbed(run, record, calm)
    assert [event["cause"] for event in run.seen("worker_lost")] == ["missing"]
    assert max(record["pause_s"]) < 15


@pytest.mark.usefixtures("ray_local")
def test_scale_during_a_fault(tmp_path: Path, calm: dict[str, Any]) -> None:
    def fault_and_scale(run: Disturbed) -> None:
        run.kill(max(run.pids))
        Requests(run.folder).post(Request(kind="scale", least=1, most=1))

    def scale_up(run: Disturbed) -> None:
        Requests(run.folder).post(Request(kind="scale", least=1, most=3))

    run = Disturbed(slow_job(tmp_path, "scale", workers="1..3"), {50: fault_and_scale, 140: scale_up})
    assert_undisturbed(run, run.run(), calm)


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_of_ten_faults(tmp_path: Path, calm: dict[str, Any], seed: int) -> None:
    """Kills, hangs and changes of size at random, with up to four workers."""
    rng = random.Random(seed)

    def fault(run: Disturbed) -> None:
        kind = rng.choice(["kill", "kill", "kill all but one", "stop", "scale"])
        alive = sorted(run.pids)
        if kind == "scale" or not alive:
            Requests(run.folder).post(Request(kind="scale", least=1, most=rng.randint(1, 4)))
        elif kind == "kill all but one":
            run.kill(*rng.sample(alive, len(alive) - 1))
        else:
            run.kill(rng.choice(alive), number=signal.SIGSTOP if kind == "stop" else signal.SIGKILL)

    steps = sorted(rng.sample(range(10, 250), 10))
    job = slow_job(tmp_path, "random", workers="1..4", failure={"heartbeat_s": 3, "max_restarts": 100})
    run = Disturbed(job, dict.fromkeys(steps, fault))
    assert_undisturbed(run, run.run(), calm)


def test_the_driver_dies_and_the_run_is_resumed(tmp_path: Path, calm: dict[str, Any], repository: Path) -> None:
    job = slow_job(tmp_path, "driver", checkpoint={"every_steps": 20})
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    command = [sys.executable, "-m", "raytrain_app", "run", str(tmp_path / "job.yaml"), "--address", "local"]
    process = subprocess.Popen(command, cwd=repository, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    directory = Folder.open(str(tmp_path)).child("driver")
    deadline_s = time.monotonic() + 180
    while not (directory.exists("metrics.jsonl") and len(RunDirectory.open(directory.uri).read_metrics()) > 60):
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run([*command, "--resume"], cwd=repository, check=True, timeout=300, capture_output=True)
    record = RunDirectory.open(directory.uri).read_result()
    assert record is not None
    assert_undisturbed(Disturbed(job), record, calm)


def drill(tmp_path: Path, repository: Path, job: dict[str, Any], *options: str) -> str:
    """Runs a drill in a process of its own, with nodes of its own, and returns what it found."""
    (tmp_path / "drill.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "raytrain_app", "drill", str(tmp_path / "drill.yaml"), "--quiet", *options]
    done = subprocess.run(command, cwd=repository, timeout=560, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nodes_are_lost_and_drained(tmp_path: Path, repository: Path) -> None:
    job = yaml.safe_load(slow_job(tmp_path, "nodes", workers="1..4").to_yaml())
    job["train"]["epochs"] = 60
    job["checkpoint"] = {"every_steps": 1, "keep": 2}  # so that every fault falls into one that is being written
    found = drill(tmp_path, repository, job, "--node", "1", "--drain", "1", "--kill", "1", "--resize", "1", "--seed", "2")
    assert "BROKEN" not in found
    assert "60 complete epochs" in found
    for cause in ("node_lost", "drain"):
        assert re.search(rf"pauses +{cause}: ", found), found


def on_nodes(scenario: str, storage: Path, repository: Path) -> dict[str, Any]:
    """Events by kind of a run in a process of its own, whose last word is that it ended as if undisturbed."""
    command = [sys.executable, "-m", "tests.integration.elastic.on_nodes", scenario, str(storage)]
    done = subprocess.run(command, cwd=repository, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads((storage / "seen.json").read_text()))


def test_a_node_that_comes_and_goes_every_few_seconds(tmp_path: Path, repository: Path) -> None:
    """It is used less and less, and the worker on the other node never waits long for it."""
    seen = on_nodes("flapping", tmp_path, repository)
    assert len(seen["pool_start"]) <= 4, "of six times that it came it was used at most three times"
    first = seen["join"][0]["worker"]
    assert first not in {event["worker"] for event in seen["worker_lost"] + seen["node_lost"]}
    assert seen["worker_lost"] == [], "what dies with its node is no crash"
    assert all(event["receipt"]["paused_s"] < 5 for event in seen["disruption"])


def test_nodes_that_are_replaced(tmp_path: Path, repository: Path) -> None:
    """Who comes has its data before it joins, and does not wait for what the lost nodes had of it."""
    seen = on_nodes("replaced", tmp_path, repository)
    assert len(seen["node_lost"]) == 2
    assert len(seen["join"]) == 4
    assert all(event["receipt"]["paused_s"] < 5 for event in seen["disruption"])


def test_a_machine_that_falls_silent(tmp_path: Path, repository: Path) -> None:
    """Nothing closes a connection; the others go on once its worker has been silent for `failure.heartbeat_s`, here 3 s."""
    seen = on_nodes("silent", tmp_path, repository)
    assert [event["cause"] for event in seen["worker_lost"]] == ["silent"]
    assert [event["receipt"]["paused_s"] < 6 for event in seen["disruption"]] == [True]


def test_a_machine_whose_packets_are_dropped_for_a_while(tmp_path: Path, repository: Path) -> None:
    """The others go on without its worker long before `failure.heartbeat_s`, here 30 s, since nothing answers there any more.

    Once it is heard again, what is left of that worker disturbs nobody, and another one comes.
    """
    reason = lacking()
    if reason:
        pytest.skip(reason)
    seen = on_nodes("cut-off", tmp_path, repository)
    there = [event["worker"] for event in seen["join"] if event["node"] == seen["far"]]
    assert [(event["worker"], event["cause"]) for event in seen["node_lost"]] == [(there[0], "died")]
    assert seen["worker_lost"] == []
    assert len(there) == 2
    assert all(event["receipt"]["paused_s"] < 15 for event in seen["disruption"])
    assert all(seconds >= 0 for event in seen["disruption"] for seconds in event["receipt"]["worker_seconds"].values())


def test_a_run_whose_last_node_is_lost_gives_up_in_time(tmp_path: Path, repository: Path) -> None:
    error = on_nodes("gone", tmp_path, repository)["error"]
    assert error.startswith("all workers are lost, the job needs 1 worker of {CPU: 1}, and the cluster has room for 0: 1 node")
    assert error.endswith("no more came within scaling.wait_s = 5 s; add nodes and go on with --resume")


def test_gpus_are_places_too(tmp_path: Path, repository: Path) -> None:
    """GPU resources on machines without one: workers are placed and counted by them, and compute on the CPU."""
    job = yaml.safe_load(slow_job(tmp_path, "gpus", workers="1..2").to_yaml())
    job["scaling"] |= {"resources_per_worker": {"CPU": 1, "GPU": 1}, "device": "cpu"}
    job["train"]["epochs"] = 30
    assert "BROKEN" not in drill(tmp_path, repository, job, "--kill", "1", "--resize", "1", "--nodes", "2")
