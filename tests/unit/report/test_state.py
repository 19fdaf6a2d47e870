"""Where a run stands, by its directory alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain_app.errors import StorageError
from raytrain_app.report import state as module
from raytrain_app.report.state import Follower, read_state, state_lines
from tests.unit.report.making import PER_EPOCH, RECEIPT, START_S, events, make_run, metrics, result, status, step, write_lines


def test_a_running_run(tmp_path: Path) -> None:
    state = read_state(make_run(tmp_path / "run", 20, now=status()), now=START_S + 13.5)
    assert state.status == "running"
    assert (state.step, state.total_steps, state.epoch, state.epochs, state.samples) == (20, 30, 2, 3, 640)
    assert (state.workers, state.limits) == (2, [1, 3])
    assert state.samples_per_s == pytest.approx(64.0)
    assert state.eta_s == pytest.approx(10 * 0.5)
    assert [member.state for member in state.members] == ["training", "training", "lost"]
    assert [member.clock for member in state.members] == [21, 21, None]
    assert state.disruptions == [RECEIPT]
    assert (state.metrics["val_loss"], state.metrics["val_accuracy"]) == (0.5, 0.95)
    assert state.checkpoint == 5
    assert not state.ended


def test_numbers_of_a_finished_run_are_those_of_its_result(tmp_path: Path) -> None:
    ended = result(20)
    state = read_state(make_run(tmp_path / "run", 20, ended=ended), now=START_S + 1e6)
    assert state.status == "finished"
    for name in module.TOTALS:
        assert state.metrics[name] == ended[name]
    assert state.samples_per_s == ended["samples_per_s"]
    assert state.worker_seconds == ended["worker_seconds"]
    assert state.eta_s is None


def test_sequences_are_also_counted_in_tokens(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 20, now=status())
    folder.write("metrics.jsonl", b"".join(json.dumps({**r, "tokens": 8 * r["samples"]}).encode() + b"\n" for r in metrics(20)))
    state = read_state(folder, now=START_S + 13.5)
    assert state.tokens_per_s == pytest.approx(512.0)
    assert "tokens" not in state.metrics
    assert "speed          64 samples, 512 tokens a second" in state_lines(state)


@pytest.mark.parametrize(
    ("steps", "now", "at_s", "expected"),
    [
        (0, None, 3.0, "starting"),
        (20, None, 13.0, "running"),
        (20, status(), 13.0, "running"),
        (20, status(stopping=True), 13.0, "stopping"),
        (20, status(), 13 + module.SILENT_S + module.SILENT_WRITES + 1, "silent"),
        (20, status(every_s=10.0), 13 + module.SILENT_S + module.SILENT_WRITES + 1, "running"),
        (20, None, 1e6, "silent"),
    ],
)
def test_status_of_a_run_without_a_result(tmp_path: Path, steps: int, now: dict[str, object], at_s: float, expected: str) -> None:
    assert read_state(make_run(tmp_path / "run", steps, now=now), now=START_S + at_s).status == expected


def test_workers_of_a_retired_pool_have_left_even_if_they_were_in_no_generation(tmp_path: Path) -> None:
    joined = {"kind": "join", "time": START_S + 12, "worker": "1.0-fedcba", "pool": 1, "node": "node3" * 8, "pid": 103}
    retired = {"kind": "pool_retire", "time": START_S + 12.3, "pool": 1}
    folder = make_run(tmp_path / "run", 20, told=[*events(), joined, retired], now=status())
    state = read_state(folder, now=START_S + 13.5)
    assert [member.state for member in state.members] == ["training", "training", "lost", "left"]


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 0, ended={"status": "failed", "error": "the loss is not finite", "samples_per_s": 0.0})
    state = read_state(folder)
    assert (state.status, state.error) == ("failed", "the loss is not finite")
    assert any("the loss is not finite" in line for line in state_lines(state))


def test_a_resumed_run_takes_up_its_workers_anew(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 20)
    write_lines(tmp_path / "run" / "events.jsonl", [{"kind": "start", "time": START_S + 500, "version": "0.1.0", "workers": 1}])
    state = read_state(folder, now=START_S + 501)
    assert {member.state for member in state.members} == {"left", "lost"}
    assert state.started == START_S


def test_a_look_reads_only_the_end_of_long_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", 3 * PER_EPOCH)
    whole = read_state(folder, now=START_S + 20)
    monkeypatch.setattr(module, "TAIL_BYTES", 3000)
    tail = read_state(folder, now=START_S + 20)
    assert len(Follower(folder, tail_only=True).look()[0]) < 20
    assert (tail.step, tail.samples, tail.metrics, tail.total_steps) == (whole.step, whole.samples, whole.metrics, 3 * PER_EPOCH)


def test_a_follower_sees_each_line_once_and_whole(tmp_path: Path) -> None:
    folder, path = make_run(tmp_path / "run", 3), tmp_path / "run" / "metrics.jsonl"
    follower = Follower(folder)
    assert [record["step"] for record in follower.look()[0]] == [1, 2, 3]
    assert follower.look() == ([], [])
    line = json.dumps(step(4)) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line[:20])
    assert follower.look()[0] == []
    with path.open("a", encoding="utf-8") as file:
        file.write(line[20:])
    assert [record["step"] for record in follower.look()[0]] == [4]
    assert follower.state(now=START_S + 5).step == 4


def test_a_follower_starts_over_when_a_resume_cut_the_file(tmp_path: Path) -> None:
    folder, path = make_run(tmp_path / "run", 10), tmp_path / "run" / "metrics.jsonl"
    follower = Follower(folder)
    follower.look()
    path.unlink()
    write_lines(path, metrics(4))
    assert [record["step"] for record in follower.look()[0]] == [1, 2, 3, 4]


def test_state_as_json_and_as_lines(tmp_path: Path) -> None:
    state = read_state(make_run(tmp_path / "run", 20, now=status()), now=START_S + 13.5)
    assert json.loads(json.dumps(state.to_json()))["members"][0]["worker"] == "0.0-abcdef"
    text = "\n".join(state_lines(state))
    assert "20 of 30" in text
    assert "0.1-abcdef on node1nod, pid 101: training" in text


def test_there_must_be_a_run(tmp_path: Path) -> None:
    from raytrain_app.storage.folder import Folder

    with pytest.raises(StorageError, match="there is no run"):
        read_state(Folder.open(str(tmp_path)))
