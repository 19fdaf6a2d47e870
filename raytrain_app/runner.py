"""`run(job)`: the wiring of a run from job to result. Read this first.

The driver checks everything, reads the data, starts the membership and the worker pools, and then only listens: it is
the one writer of the run's files. Workers train (`strategies`), and need the driver for nothing while they do.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_app import __version__
from raytrain_app.checks import find_problems
from raytrain_app.data import Dataset, load
from raytrain_app.elastic.membership import Dated, Failure, Mail, Membership
from raytrain_app.elastic.progress import record_clock, steps_per_epoch
from raytrain_app.errors import Interrupted, JobError, RaytrainError, TrainingError
from raytrain_app.job import Job
from raytrain_app.report.updates import Update
from raytrain_app.session import ray_session
from raytrain_app.storage.rundir import RunDirectory
from raytrain_app.storage.tensorboard import TensorBoardWriter
from raytrain_app.strategies import train_body
from raytrain_app.strategies.worker import WorkerSpec
from raytrain_app.supervisor import Supervisor
from raytrain_app.task import load_task

OnUpdate = Callable[[Update], None]
MAIL_S = 0.5
"""Longest wait for news from the workers, and so for noticing Ctrl-C."""
CLOSE_S = 20.0
"""How long workers have to return after the run is over, before their actors are ended."""


@dataclass
class Result:
    """How a run ended.

    Attributes:
        record: the content of result.json.
        directory: URI of the run directory.
    """

    record: dict[str, Any]
    directory: str


def run(job: Job, *, resume: bool = False, address: str | None = None, on_update: OnUpdate | None = None) -> Result:
    """Trains a job to its end.

    Args:
        job: what to train.
        resume: go on with the run of this name where it stopped.
        address: Ray cluster to use; None is the one that RAY_ADDRESS names, else Ray on this machine.
        on_update: called with every step, epoch and event, from this thread.

    Raises:
        JobError, DataError, StorageError: before a worker starts; nothing is left behind.
        ClusterError: the cluster could not give the minimum of workers in time.
        TrainingError: training failed; result.json says so.
        Interrupted: stopped by Ctrl-C, SIGTERM or `raytrain stop`; a checkpoint is written.
    """
    update = on_update or (lambda _: None)
    task = load_task(job.task)
    problems = find_problems(job, task)
    if problems:
        raise JobError("\n".join(problems))
    directory = RunDirectory.reopen(job) if resume else RunDirectory.reserve(job)
    update(Update("phase", "starting Ray"))
    with ray_session(address), _interrupts() as interrupted:
        supervisor = Supervisor(job)
        size = supervisor.wait_for_capacity(lambda text: update(Update("note", text)))
        update(Update("phase", "reading data"))
        dataset = load(job, task)
        with directory.writing(dataset.fingerprint):
            return _Run(job, dataset, directory, supervisor, update, interrupted).to_the_end(size)


class _Run:
    """The driver's side of one run: what came from the workers goes to files and to `update`."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        directory: RunDirectory,
        supervisor: Supervisor,
        update: OnUpdate,
        interrupted: threading.Event,
    ) -> None:
        self.job, self.dataset, self.directory, self.supervisor = job, dataset, directory, supervisor
        self.update, self.interrupted = update, interrupted
        self.started_s = time.time()
        self.total_steps = steps_per_epoch(len(dataset.train), job.train.global_batch_size) * job.train.epochs
        self.recorded = max((clock for r in directory.read_metrics() if (clock := record_clock(r)) is not None), default=-1)
        self.events = list(directory.read_events())
        self.first_samples = 0
        self.tensorboard = TensorBoardWriter(directory) if job.tensorboard else None

    def to_the_end(self, size: int) -> Result:
        """Starts the workers and listens until the run is over; writes result.json whatever the end is."""
        for note in self.dataset.notes:
            self.update(Update("note", note))
        self._write_event({"kind": "start", "time": time.time(), "version": __version__, "ray": ray.__version__, "workers": size})
        membership = _start_membership(self.job, size, self.recorded)
        outcome: RaytrainError | None = None
        summaries: list[dict[str, Any]] = []
        try:
            dataset = [ray.put(self.dataset)]
            self.update(Update("phase", f"starting {size} worker{'s' if size > 1 else ''}"))
            self.supervisor.start(
                size,
                train_body(self.job),
                lambda pool: WorkerSpec(self.job.model_dump(mode="json"), dataset, membership, self.directory.uri, pool),
            )
            summaries = self._listen(membership)
        except RaytrainError as error:
            outcome = error
        record = self._result(summaries, outcome, ray.get(membership.seconds.remote()))
        self._write_event({"kind": "finish", "time": time.time(), "status": record["status"]})
        self.directory.write_result(record)
        if self.tensorboard is not None:
            self.tensorboard.close()
        self.supervisor.close(CLOSE_S)
        ray.kill(membership)
        if outcome is not None:
            raise outcome
        if record["status"] == "stopped":
            raise Interrupted(f"stopped at step {record['steps']}; a checkpoint is written, and --resume goes on from there")
        return Result(record, self.directory.uri)

    def _listen(self, membership: ActorHandle) -> list[dict[str, Any]]:
        """Takes mail until all workers are done; returns their summaries."""
        asked = False
        while True:
            mail: Mail = ray.get(membership.mail.remote(self.recorded, MAIL_S))
            self._take(mail.records)
            if mail.failure is not None:
                raise _training_error(mail.failure)
            if mail.summaries:
                return mail.summaries
            error = self.supervisor.failed()
            if error is not None:
                raise TrainingError(f"Ray Train gave up on the workers: {' '.join(str(error).split())}")
            if self.interrupted.is_set() and not asked:
                self.update(Update("note", "stopping: finishing the step and writing a checkpoint (Ctrl-C again ends at once)"))
                ray.get(membership.request.remote(stop=True))
                asked = True

    def _take(self, records: list[Dated]) -> None:
        metrics = []
        for clock, record in records:
            if clock is None:
                self._write_event(record)
            elif clock > self.recorded:
                self.recorded = clock
                metrics.append(record)
                self.update(Update(record["kind"], "", {**record, "total_steps": self.total_steps}))
        if metrics:
            self.directory.append_metrics(metrics)
            if self.tensorboard is not None:
                self.tensorboard.add(metrics)

    def _write_event(self, record: dict[str, Any]) -> None:
        self.events.append(record)
        self.directory.append_events([record])
        self.update(Update("event", _event_text(record), record))

    def _result(
        self, summaries: list[dict[str, Any]], outcome: RaytrainError | None, seconds: dict[str, dict[str, float]]
    ) -> dict[str, Any]:
        """The content of result.json (the run directory's documentation lists the keys)."""
        hashes = {summary["weights_sha256"] for summary in summaries}
        if len(hashes) > 1:
            raise TrainingError(f"the workers ended with different weights ({', '.join(sorted(hashes))}); this is a bug, please report it")
        ends = dict(summaries[0]) if summaries else {"status": "failed"}
        wall_s = time.time() - self.started_s
        kinds = {json.dumps(e["computes_on"], sort_keys=True): e["computes_on"] for e in self.events if e["kind"] == "join"}
        by_class = {name: sum(s.get(name, 0.0) for s in seconds.values()) for name in ("useful", "redone", "starting", "idle")}
        spent = sum(by_class.values())
        samples = ends.get("samples", 0)
        return {
            "status": ends.pop("status"),
            "error": str(outcome) if outcome is not None else None,
            "framework": self.job.framework,
            "strategy": self.job.strategy.name,
            **ends,
            "workers": [[e["time"], e["workers"]] for e in self.events if e["kind"] == "generation"],
            "computes_on": list(kinds.values()),
            "disruptions": [e for e in self.events if "receipt" in e],
            "steps_redone": 0,
            "pause_s": [],
            "worker_seconds": by_class,
            "goodput": by_class["useful"] / spent if spent else None,
            "wall_s": wall_s,
            "samples_per_s": samples / wall_s,
            "checkpoint": self.directory.best_checkpoint(),
        }


def _start_membership(job: Job, size: int, recorded: int) -> ActorHandle:
    """Starts the membership actor on the driver's node: elsewhere it could die with a worker's node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Membership).options(num_cpus=0, max_concurrency=1000, max_restarts=-1, scheduling_strategy=here)
    membership = actor.remote(size, recorded, job.failure.heartbeat_s)
    membership.watch.remote()
    return membership


def _training_error(failure: Failure) -> TrainingError:
    return TrainingError(failure.message, failure.traceback)


def _event_text(record: dict[str, Any]) -> str:
    """A sentence for the events that people want to hear of."""
    if record["kind"] == "worker_lost":
        return f"lost worker {record['worker']} ({record['cause']})"
    if record["kind"] == "resume":
        return f"going on from step {record['step']}"
    if record["kind"] == "checkpoint_damaged":
        return str(record["message"])
    return f"a checkpoint could not be written: {record['error']}" if record["kind"] == "checkpoint_failed" else ""


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Sets the event on the first Ctrl-C or SIGTERM; the second ends the program at once."""
    interrupted = threading.Event()

    def handle(signum: int, frame: Any) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
