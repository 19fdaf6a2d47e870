"""Processes that stay: runs of the real strategy on real Ray actors, without a new pool of workers for each of them.

A run of the program takes some seconds, most of them to start processes. Here a process is started when it is first needed
and takes part in many runs, with the program's own membership, learner, reader and reduction.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from raytrain_app.data import Dataset, Split, load
from raytrain_app.elastic.mail import Mail
from raytrain_app.elastic.membership import Membership
from raytrain_app.elastic.progress import Stopwatch
from raytrain_app.errors import RaytrainError
from raytrain_app.job import Job
from raytrain_app.state import TrainState
from raytrain_app.storage.checkpoints import CheckpointStore
from raytrain_app.storage.folder import Folder
from raytrain_app.strategies import allreduce, model_parallel
from raytrain_app.strategies.worker import WorkerSpec, _build, reporting
from raytrain_app.task import load_task

LIMIT_S = 240.0


class Replica:
    """A process that acts as one worker of one run after the other."""

    def train(self, spec: WorkerSpec, rank: int) -> None:
        """What a worker of a pool does."""
        job = Job.model_validate(spec.job)
        worker_id = f"{spec.pool}.{rank}-{uuid.uuid4().hex[:6]}"
        with reporting(spec.membership):
            worker = _build(spec, job, worker_id, rank, Stopwatch())
            try:
                train = model_parallel.train if job.replica_workers > 1 else allreduce.train
                train(worker)
            finally:
                worker.link.deliver()
                worker.link.close()


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        directory: where its checkpoints are.
        metrics: its step and epoch records.
        events: its events.
        summaries: one a worker, unless it failed.
        failure: what ended it, if it failed.
        recorded: clock up to which `metrics` has its records.
    """

    directory: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    summaries: list[dict[str, Any]] = field(default_factory=list)
    failure: RaytrainError | None = None
    recorded: int = 0

    @property
    def summary(self) -> dict[str, Any]:
        """What all workers say alike; they name themselves beside it."""
        first, *others = [{k: v for k, v in summary.items() if k != "worker"} for summary in self.summaries]
        assert all(other == first for other in others)
        return first

    @property
    def comparable(self) -> list[dict[str, Any]]:
        """The metrics without what may differ between equal runs."""
        return [{k: v for k, v in record.items() if k not in ("time", "workers")} for record in self.metrics]

    def checkpoints(self, job: Job) -> CheckpointStore:
        """Its checkpoints."""
        rule = job.checkpoint
        return CheckpointStore(Folder.open(str(self.directory)).child("checkpoints"), rule.keep, rule.monitor, rule.mode)

    def checkpoint(self, job: Job, which: str = "latest") -> TrainState:
        """A good one, without the metrics that the driver had not written by then: these depend on its pace."""
        found = self.checkpoints(job).load(which)
        assert found is not None
        state, _, messages = found
        assert not messages
        return dataclasses.replace(state, progress={k: v for k, v in state.progress.items() if k != "unrecorded"})


class Replicas:
    """As many processes as the runs need.

    Args:
        folder: where the runs' directories are made.
    """

    def __init__(self, folder: Path) -> None:
        self._actors: list[Any] = []
        self._folder = folder

    def load(self, job: Job, train: int | None = None, validation: int | None = None, test: int | None = None) -> Dataset:
        """The job's data, its splits cut to the given numbers of rows."""
        dataset = load(job, load_task(job.task))

        def cut(split: Split | None, rows: int | None) -> Any:
            return split and dataclasses.replace(split, ids=split.ids[:rows])

        return dataclasses.replace(
            dataset, train=cut(dataset.train, train), validation=cut(dataset.validation, validation), test=cut(dataset.test, test)
        )

    def run(self, job: Job, workers: int, dataset: Dataset, directory: Path | None = None) -> Outcome:
        """Trains a job on `workers` processes; with the `directory` of another run from its newest checkpoint on."""
        outcome = Outcome(directory or self._folder / uuid.uuid4().hex[:8])
        if directory is not None and (found := outcome.checkpoints(job).load("latest")) is not None:
            outcome.recorded = found[0].progress["step"] + found[0].progress["epoch"]
        actor: Any = ray.remote(Membership)
        membership = actor.options(num_cpus=0, max_concurrency=100).remote(workers, outcome.recorded, 30.0)
        spec = WorkerSpec(job.model_dump(mode="json"), ray.put([ray.put(dataset)]), membership, None, str(outcome.directory), 0)
        size = job.replica_workers if job.replica_workers > 1 else workers  # of a pool
        while len(self._actors) < workers:
            start: Any = ray.remote(Replica)
            self._actors.append(start.options(num_cpus=0).remote())
        ends = [
            actor.train.remote(dataclasses.replace(spec, pool=number // size), number % size)
            for number, actor in enumerate(self._actors[:workers])
        ]
        deadline_s = time.monotonic() + LIMIT_S
        while not outcome.summaries and outcome.failure is None:
            assert time.monotonic() < deadline_s, "the run does not end"
            ray.get(ray.wait(ends, timeout=0)[0])  # an error outside of what is reported is not waited for
            self._take(membership, outcome)
        ray.get(ends)
        self._take(membership, outcome)
        ray.kill(membership)
        return outcome

    def _take(self, membership: Any, outcome: Outcome) -> None:
        mail: Mail = ray.get(membership.mail.remote(outcome.recorded, 0.5))
        for clock, record in mail.records:
            (outcome.events if clock is None else outcome.metrics).append(record)
            outcome.recorded = max(outcome.recorded, 0 if clock is None else clock)
        outcome.summaries, outcome.failure = mail.summaries, mail.failure
