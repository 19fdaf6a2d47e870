"""The driver's pen: everything that happens in a run goes through here into the run directory and to whoever watches."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from typing import Any

from raytrain_app.elastic.mail import Mail
from raytrain_app.elastic.progress import record_clock, steps_per_epoch
from raytrain_app.elastic.receipts import Receipts
from raytrain_app.errors import Interrupted, RaytrainError, TrainingError
from raytrain_app.job import Job
from raytrain_app.report.happenings import sentence
from raytrain_app.report.updates import Update
from raytrain_app.scaling import Abort, Decision, Retire, Start
from raytrain_app.storage.requests import Request, Requests
from raytrain_app.storage.rundir import RunDirectory
from raytrain_app.storage.tensorboard import TensorBoardWriter
from raytrain_app.task import Task
from raytrain_app.throughput import tokens_of, utilization

Record = dict[str, Any]


class Recorder:
    """Writes metrics.jsonl, events.jsonl, TensorBoard files and result.json of one run. Not for several threads.

    Args:
        job: what is trained.
        task: of the job.
        num_rows: rows of the training split.
        directory: where to write; what a resumed run holds already is not written again.
        update: told of everything.
    """

    def __init__(self, job: Job, task: Task, num_rows: int, directory: RunDirectory, update: Callable[[Update], None]) -> None:
        self._job, self._task, self._directory, self._update = job, task, directory, update
        self._started_s = time.time()
        self._total_steps = steps_per_epoch(num_rows, job.train.global_batch_size) * job.train.epochs
        earlier = directory.read_metrics()
        self.recorded = max((clock for record in earlier if (clock := record_clock(record)) is not None), default=0)
        self._samples_before = max((record.get("samples", 0) for record in earlier), default=0)
        self._events: list[Record] = list(directory.read_events())
        self._receipts = Receipts([event["receipt"] for event in self._events if "receipt" in event])
        self._seconds: dict[str, float] = {}
        self._requests = Requests(directory.folder)
        self._status_s, self._status_every_s = 0.0, 1.0 if directory.folder.local_path is not None else 10.0
        self._tensorboard = TensorBoardWriter(directory) if job.tensorboard else None

    def take(self, mail: Mail, living: Collection[str]) -> list[Record]:
        """Writes what came in one call from the membership.

        Args:
            mail: what came.
            living: ids of the nodes that are alive, to tell a lost machine from a crash.

        Returns:
            The events of worker processes that crashed on a machine that lives on.
        """
        crashes, metrics, applied = [], [], []
        self._seconds = mail.seconds
        for clock, record in mail.records:
            if record["kind"] == "servers":
                metrics.append(record)
            elif clock is None:
                if record["kind"] == "worker_lost" and record["node"] not in living:
                    record = {**record, "kind": "node_lost"}
                elif record["kind"] == "worker_lost" and record["cause"] == "died":
                    crashes.append(record)
                self._write_event(record)
                self._receipts.event(record)
            elif clock > self.recorded:
                self.recorded = clock
                ids = record.pop("ids", None)
                if ids is not None:
                    applied.append({"epoch": record["epoch"], "step": record["step"], "ids": ids})
                if (tokens := tokens_of(self._task, record["samples"])) is not None:
                    record["tokens"] = tokens
                metrics.append(record)
                self._update(Update(record["kind"], "", {**record, "total_steps": self._total_steps}))
                receipt = self._receipts.step(record, mail.seconds) if record["kind"] == "step" else None
                if receipt is not None:
                    self.event("disruption", receipt=receipt)
        self._directory.append_ledger(applied)  # before the metrics, which say what a resumed run need not write again
        if metrics:
            self._directory.append_metrics(metrics)
            if self._tensorboard is not None:
                self._tensorboard.add(metrics)
        return crashes

    def requests(self) -> list[Request]:
        """What other processes ask of the run."""
        return self._requests.take()

    def decision(self, decision: Decision) -> None:
        """Tells what the supervisor does about pools."""
        if isinstance(decision, Start):
            self.event("pool_start", node=decision.node_id, workers=decision.size)
        elif isinstance(decision, Retire):
            self.event("drain" if decision.draining else "pool_retire", pool=decision.pool)
        elif isinstance(decision, Abort):
            self.event("pool_abort", pool=decision.pool)

    def status(self, mail: Mail, limits: tuple[int, int], servers: Callable[[], list[Record]], lack: str) -> None:
        """Writes status.json every second or so: who trains, and that the driver is alive.

        `servers` tells of others, and `lack` why machines do not come, empty where that is not so.
        """
        now_s = time.time()
        if now_s - self._status_s < self._status_every_s:
            return
        self._status_s = now_s
        workers = [
            {"worker": w.worker_id, "pool": w.pool, "node": w.node_id, "pid": w.pid, "state": w.standing.value, "clock": w.clock}
            for w in mail.workers
        ]
        status = {
            "time": now_s,
            "every_s": self._status_every_s,
            "generation": mail.generation,
            "stopping": mail.stopping,
            "limits": list(limits),
            "total_steps": self._total_steps,
            "workers": workers,
            "lack": lack,
            "servers": servers(),
            "worker_seconds": mail.seconds,
        }
        self._directory.write_status(status)

    def event(self, kind: str, **details: Any) -> None:
        """Writes an event of the driver's own."""
        record = {"kind": kind, "time": time.time(), **details}
        self._write_event(record)
        self._receipts.event(record)

    def phase(self, text: str) -> None:
        """Says what the run is doing now."""
        self._update(Update("phase", text))

    def note(self, text: str) -> None:
        """Says something worth knowing once."""
        self._update(Update("note", text))

    def finish(self, summaries: list[Record], error: RaytrainError | None) -> Record:
        """Writes result.json and closes all files; returns its content.

        Raises:
            TrainingError: the workers ended with different weights, which must not happen.
        """
        hashes = {summary["weights_sha256"] for summary in summaries}
        without = {"status": "stopped" if isinstance(error, Interrupted) else "failed"}
        record = self._result(summaries[0] if len(hashes) == 1 else without, error)
        self.event("finish", status=record["status"])
        self._directory.write_result(record)
        self._update(Update("result", "", record))
        if self._tensorboard is not None:
            self._tensorboard.close()
        if len(hashes) > 1:
            raise TrainingError(f"the workers ended with different weights ({', '.join(sorted(hashes))}); please report this")
        return record

    def _write_event(self, record: Record) -> None:
        self._events.append(record)
        self._directory.append_events([record])
        self._update(Update("event", _sentence(record), record))

    def _result(self, ends: Record, error: RaytrainError | None) -> Record:
        wall_s = time.time() - self._started_s
        kinds = {json.dumps(e["computes_on"], sort_keys=True): e["computes_on"] for e in self._events if e["kind"] == "join"}
        spent_s = sum(self._seconds.values())
        receipts = self._receipts.given
        samples = max(0, ends.get("samples", 0) - self._samples_before)
        tokens = tokens_of(self._task, samples)
        return {
            "status": ends["status"],
            "error": str(error) if error is not None else None,
            "framework": self._job.framework,
            "strategy": self._job.strategy.name,
            **{key: value for key, value in ends.items() if key not in ("status", "worker")},
            "workers": [[e["time"], e["workers"]] for e in self._events if e["kind"] == "generation"],
            "computes_on": list(kinds.values()),
            "disruptions": receipts,
            "steps_redone": sum(receipt["steps_redone"] for receipt in receipts),
            "pause_s": [receipt["paused_s"] for receipt in receipts],
            "worker_seconds": self._seconds,
            "goodput": self._seconds.get("useful", 0.0) / spent_s if spent_s else None,
            "wall_s": wall_s,
            "samples_per_s": samples / wall_s,
            "tokens_per_s": None if tokens is None else tokens / wall_s,
            "model_flops_utilization": utilization(
                self._job, self._task, samples, self._seconds.get("useful", 0.0), list(kinds.values())
            ),
            "checkpoint": self._directory.best_checkpoint(),
        }


_TOLD_ALIKE = frozenset(
    {
        "worker_lost",
        "node_lost",
        "server_lost",
        "roll_back",
        "reshard",
        "reshard_failed",
        "checkpoint_damaged",
        "checkpoint_failed",
    }
)
"""Kinds of events that are told while training as they are told afterwards."""


def _sentence(event: Record) -> str:
    """A sentence for the events that people want to hear of."""
    kind = event["kind"]
    if kind in _TOLD_ALIKE:
        return sentence(event)
    if kind == "resume":
        return f"going on from step {event['step']} ({event['source']})"
    if kind == "disruption":
        receipt = event["receipt"]
        return f"{receipt['workers_before']} to {receipt['workers_after']} workers, paused {receipt['paused_s']:.2f} s"
    return ""
