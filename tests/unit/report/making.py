"""Run directories, written the way the driver writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raytrain_app.job import job_from_dict
from raytrain_app.storage.folder import Folder

START_S = 1_790_000_000.0
STEP_S = 0.5
ROWS, BATCH = 320, 32
PER_EPOCH = ROWS // BATCH
RECEIPT = {
    "cause": "worker_lost",
    "time": START_S + 8.0,
    "detected_s": 0.1,
    "paused_s": 0.25,
    "steps_redone": 1,
    "samples_redone": BATCH,
    "workers_before": 3,
    "workers_after": 2,
    "worker_seconds": {"useful": 0.0, "redone": 0.5, "starting": 0.0, "idle": 0.3},
}


def step(number: int, **more: Any) -> dict[str, Any]:
    """The line of a step; loss falls from 2 and accuracy rises."""
    return {
        "kind": "step",
        "epoch": (number - 1) // PER_EPOCH + 1,
        "step": number,
        "samples": number * BATCH,
        "loss": 2.0 * 0.9**number,
        "accuracy": 1 - 0.9**number,
        "lr": 0.01,
        "workers": 3 if number < 14 else 2,
        "time": START_S + 2.0 + number * STEP_S,
        **more,
    }


def epoch(number: int) -> dict[str, Any]:
    """The line of an epoch's end."""
    return {
        **step(number * PER_EPOCH),
        "kind": "epoch",
        "epoch": number,
        "val_loss": 1.0 / number,
        "val_accuracy": 1 - 0.1 / number,
    }


def metrics(steps: int) -> list[dict[str, Any]]:
    """The lines of a run of so many steps."""
    lines = []
    for number in range(1, steps + 1):
        lines.append(step(number))
        if number % PER_EPOCH == 0:
            lines.append(epoch(number // PER_EPOCH))
    return lines


def events() -> list[dict[str, Any]]:
    """Three workers start and one is lost."""
    joins = [
        {
            "kind": "join",
            "time": START_S + 1,
            "worker": f"0.{rank}-abcdef",
            "pool": 0,
            "node": f"node{rank}" * 8,
            "pid": 100 + rank,
        }
        for rank in range(3)
    ]
    return [
        {"kind": "start", "time": START_S, "version": "0.1.0", "ray": "2.60.0", "workers": 3},
        *joins,
        {"kind": "generation", "time": START_S + 2, "generation": 1, "workers": 3},
        {"kind": "checkpoint", "time": START_S + 5, "step": 5, "path": "/somewhere/step-00000005", "seconds": 0.1},
        {"kind": "worker_lost", "time": START_S + 8, "worker": "0.2-abcdef", "node": "node2" * 8, "cause": "died", "workers": 2},
        {"kind": "generation", "time": START_S + 8.1, "generation": 2, "workers": 2},
        {"kind": "disruption", "time": START_S + 8.4, "receipt": RECEIPT},
    ]


def result(steps: int, **more: Any) -> dict[str, Any]:
    """The content of result.json."""
    last = epoch(max(1, steps // PER_EPOCH))
    return {
        "status": "finished",
        "error": None,
        "framework": "torch",
        "strategy": "allreduce",
        "epochs": steps // PER_EPOCH,
        "steps": steps,
        "samples": steps * BATCH,
        "train_loss": last["loss"],
        "val_loss": last["val_loss"],
        "val_accuracy": last["val_accuracy"],
        "test_loss": 0.3,
        "test_accuracy": 0.95,
        "weights_sha256": "ab" * 32,
        "computes_on": [{"torch": "2.13.0", "cpu": "some CPU"}],
        "disruptions": [RECEIPT],
        "steps_redone": 1,
        "pause_s": [0.25],
        "worker_seconds": {"useful": 30.0, "redone": 0.5, "starting": 3.0, "idle": 1.0},
        "goodput": 30 / 34.5,
        "wall_s": 20.0,
        "samples_per_s": 64.0,
        "checkpoint": "/somewhere/step-00000020",
        **more,
    }


def status(**more: Any) -> dict[str, Any]:
    """The content of status.json."""
    workers = [
        {"worker": f"0.{rank}-abcdef", "pool": 0, "node": f"node{rank}" * 8, "pid": 100 + rank, "state": "active", "clock": 21}
        for rank in range(2)
    ]
    return {
        "time": START_S + 13,
        "every_s": 1.0,
        "generation": 2,
        "stopping": False,
        "limits": [1, 3],
        "total_steps": 3 * PER_EPOCH,
        "workers": workers,
        "worker_seconds": {"useful": 20.0, "redone": 0.5, "starting": 3.0, "idle": 1.0},
        **more,
    }


def make_run(
    path: Path,
    steps: int = 20,
    *,
    ended: Mapping[str, Any] | None = None,
    told: Iterable[Mapping[str, Any]] | None = None,
    now: Mapping[str, Any] | None = None,
    **job: Any,
) -> Folder:
    """Writes a run directory.

    Args:
        path: where.
        steps: applied.
        ended: content of result.json.
        told: events; None are those of `events`.
        now: content of status.json.
        job: keys of the job.
    """
    path.mkdir(parents=True)
    raw = {
        "name": path.name,
        "task": "mnist",
        "model": {"name": "mlp"},
        "train": {"epochs": 3, "global_batch_size": BATCH},
        "scaling": {"workers": "1..3"},
        "storage": str(path.parent),
        **job,
    }
    (path / "job.yaml").write_text(job_from_dict(raw).to_yaml(), encoding="utf-8")
    write_lines(path / "metrics.jsonl", metrics(steps))
    write_lines(path / "events.jsonl", events() if told is None else told)
    for name, content in (("result.json", ended), ("status.json", now)):
        if content is not None:
            (path / name).write_text(json.dumps(content), encoding="utf-8")
    return Folder.open(str(path))


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Adds lines to a file of records."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
