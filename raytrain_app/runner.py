"""`run(job)`: the wiring of a run from job to result. Read this first.

The driver checks everything, starts the membership and the worker pools, reads the data meanwhile, and then only listens: it
is the one writer of the run's files. Workers train (`strategies`), and need the driver for nothing while they do.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray

from raytrain_app import __version__
from raytrain_app.actors import Actor, start_here, wait_for
from raytrain_app.checks import find_problems, require_lasting
from raytrain_app.cluster.launches import LaunchFailures
from raytrain_app.cluster.nodes import Node, living_nodes
from raytrain_app.data import Dataset, load
from raytrain_app.elastic.budget import FailureBudget
from raytrain_app.elastic.mail import Mail
from raytrain_app.elastic.vault import Vault
from raytrain_app.errors import ClusterError, Interrupted, JobError, RaytrainError, TrainingError
from raytrain_app.group_supervisor import GroupSupervisor
from raytrain_app.job import Job
from raytrain_app.recorder import Recorder
from raytrain_app.report.listeners import listening
from raytrain_app.report.updates import Update
from raytrain_app.scaling import Decision
from raytrain_app.session import ray_session
from raytrain_app.storage.audit import write_rows
from raytrain_app.storage.rundir import RunDirectory
from raytrain_app.strategies import Services, has_services, membership_kind, prepare_resume, start_services, train_body
from raytrain_app.strategies.worker import NO_POOL, WorkerSpec
from raytrain_app.supervisor import PoolBody, Supervisor, wait_for_capacity
from raytrain_app.task import load_task

OnUpdate = Callable[[Update], None]
MAIL_S = 0.5
"""Longest wait for news from the workers, and so for noticing Ctrl-C."""
START_S = 60.0
"""How long worker processes may take to start where there is room for them, however short `scaling.wait_s` is."""
CLOSE_S = 20.0
"""How long workers have to return after the run has failed, before they are ended: a checkpoint may be under way."""
LAST_S = 5.0
"""The same after a run that came to its end: those that count have said goodbye, others may only just be starting."""


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
        JobError, DataError, StorageError: before the run begins; nothing is left behind.
        ClusterError: the cluster could not give the minimum of workers in time.
        TrainingError: training failed; result.json says so.
        Interrupted: stopped by Ctrl-C, SIGTERM or `raytrain stop`; a checkpoint is written.
    """
    update = on_update or (lambda _: None)
    task = load_task(job.task, job.data.classes)
    problems = find_problems(job, task)
    if problems:
        raise JobError("\n".join(problems))
    directory = RunDirectory.reopen(job) if resume else RunDirectory.reserve(job)
    if not ray.is_initialized():
        update(Update("phase", "starting Ray"))
    with ray_session(address), listening(job, directory.uri, update) as update:
        if note := require_lasting(directory.folder.local_path, job):
            update(Update("note", note))
        size = wait_for_capacity(job, lambda text: update(Update("note", text)))
        update(Update("phase", "reading data"))
        with _team(job, directory.uri, size) as team:
            dataset = load(job, task)
            for note in dataset.notes:
                update(Update("note", note))
            with directory.writing(dataset.fingerprint), _interrupts() as interrupted:
                if job.audit:
                    write_rows(directory.ledger, dataset.train.ids)
                if resume:
                    prepare_resume(job, directory)
                recorder = Recorder(job, task, len(dataset.train), directory, update)
                record = _train(job, dataset, team, recorder, interrupted)
    if record["status"] == "stopped":
        raise Interrupted(f"stopped at step {record['steps']}; a checkpoint is written, and --resume goes on from there")
    return Result(record, directory.uri)


@dataclass(frozen=True)
class _Team:
    """What trains: the membership with the number of workers it waits for at first, what a worker gets, and the pools."""

    membership: Actor
    size: int
    spec: WorkerSpec
    supervisor: Supervisor | GroupSupervisor
    begun: Sequence[Decision]


@contextmanager
def _team(job: Job, directory: str, size: int) -> Iterator[_Team]:
    """Starts the membership and, while the data is still being read, the pools; in the end nothing of it is left.

    Processes take seconds to start and to import what they need. Workers then wait for the data set, which `_train` gives.
    """
    membership = start_here(membership_kind(job), size, 0, job.failure.heartbeat_s, options={"max_concurrency": 1000})
    vault = start_here(Vault)
    spec = WorkerSpec(job.model_dump(mode="json"), membership.dataset.remote(), membership, vault, directory, NO_POOL)
    supervise = GroupSupervisor if job.uses_tf_distribute else Supervisor
    supervisor = supervise(job, membership, PoolBody(train_body(job), lambda pool: replace(spec, pool=pool)))
    try:
        # The CPUs of services come first, and those of workers are what is left.
        begun = [] if has_services(job) else supervisor.tend(Mail(), living_nodes(), job.scaling.workers.max)
        yield _Team(membership, size, spec, supervisor, begun)
    finally:
        supervisor.close(0.0)
        ray.kill(membership)
        ray.kill(vault)


def _train(job: Job, dataset: Dataset, team: _Team, recorder: Recorder, interrupted: threading.Event) -> dict[str, Any]:
    """Gives the workers their data, listens until the run is over, and writes result.json whatever the end is."""
    recorder.event("start", version=__version__, ray=ray.__version__, workers=team.size)
    for decision in team.begun:
        recorder.decision(decision)
    membership, supervisor = team.membership, team.supervisor
    wait_for(membership.open.remote([ray.put(dataset)], recorder.recorded))
    services = start_services(job, team.spec, len(dataset.train))
    outcome: RaytrainError | None = None
    summaries: list[dict[str, Any]] = []
    try:
        recorder.phase(f"starting {team.size} worker{'s' if team.size > 1 else ''}")
        summaries = _listen(job, membership, services, supervisor, recorder, interrupted)
    except (RaytrainError, KeyboardInterrupt) as error:
        outcome = error if isinstance(error, RaytrainError) else Interrupted("ended at once; --resume goes on from there")
        wait_for(membership.fail.remote(outcome))  # for workers that know nothing of it
        supervisor.close(0.0 if isinstance(outcome, Interrupted) else CLOSE_S)
        last: Mail = wait_for(membership.mail.remote(recorder.recorded, 0.0))  # what workers told while they ended
        recorder.take(last, {node.node_id for node in _nodes(last)})
    record = recorder.finish(summaries, outcome)
    supervisor.close(LAST_S)
    services.close()
    if outcome is not None:
        raise outcome
    return record


def _listen(
    job: Job,
    membership: Actor,
    services: Services,
    supervisor: Supervisor | GroupSupervisor,
    recorder: Recorder,
    interrupted: threading.Event,
) -> list[dict[str, Any]]:
    """Takes mail and tends the pools until all workers are done; returns their summaries."""
    budget, started_s = FailureBudget(job.failure.max_restarts), time.monotonic()
    limits = job.scaling.workers.min, job.scaling.workers.max
    failures, stop = LaunchFailures(), False
    nodes: list[Node] = []
    looked_s = -math.inf
    while True:
        mail: Mail = wait_for(membership.mail.remote(recorder.recorded, MAIL_S))
        # Steps alone come several times a second, and to look at the cluster takes time that the workers may lack.
        looks = mail.has_events or time.monotonic() - looked_s >= MAIL_S
        if looks:
            nodes, looked_s = _nodes(mail), time.monotonic()
        for crash in recorder.take(mail, {node.node_id for node in nodes}):
            reason = budget.crash(recorder.recorded, crash["generation"])
            if reason is not None:
                raise TrainingError(f"{reason}. The last to die was worker {crash['worker']}")
            recorder.note(f"crashes so far: {budget.used} of the {budget.max_restarts} that failure.max_restarts allows")
        if mail.failure is not None:
            raise mail.failure
        if mail.summaries:
            return mail.summaries
        for request in recorder.requests():
            stop = stop or request["kind"] == "stop"
            if request["kind"] == "scale":
                limits, looks = (request["least"], min(request["most"], job.most_workers)), True
                recorder.event("scale", least=limits[0], most=limits[1])
            elif request["kind"] == "servers":
                services.scale(request["servers"])
            elif request["kind"] == "checkpoint":
                wait_for(membership.request.remote(checkpoint=True))
        if (stop or interrupted.is_set()) and not mail.generation:
            raise Interrupted("stopped before the first step; --resume goes on from there")
        if (stop or interrupted.is_set()) and not mail.stopping:
            recorder.note("stopping: finishing the step and writing a checkpoint (Ctrl-C again ends at once)")
            wait_for(membership.request.remote(stop=True))
        if not mail.generation and time.monotonic() - started_s > max(job.scaling.wait_s, START_S):
            _start_with_those_there(job, membership, mail)
        lacking = len(mail.workers) < limits[1]
        if lacking and (reason := failures.news()):
            recorder.note(reason)
        if looks:
            for decision in supervisor.tend(mail, nodes, limits[1]):
                recorder.decision(decision)
        recorder.status(mail, limits, services.status, failures.reason if lacking else "")


def _nodes(mail: Mail) -> list[Node]:
    """The nodes that are really there: of some the membership knows earlier than Ray that they are gone."""
    return [node for node in living_nodes() if node.node_id not in mail.lost_nodes]


def _start_with_those_there(job: Job, membership: Actor, mail: Mail) -> None:
    """After `scaling.wait_s`, but not before `START_S`, a run starts with the workers that came, if they are enough."""
    unit, pools = job.replica_workers, Counter(worker.pool for worker in mail.workers)
    there = sum(count // unit * unit for count in pools.values())  # of replicas in parts only the whole ones count
    if there < job.scaling.workers.min:
        raise ClusterError(
            f"{there} of at least {job.scaling.workers.min} workers started within "
            f"{max(job.scaling.wait_s, START_S):g} s (scaling.wait_s is {job.scaling.wait_s:g}); "
            "something else may use the cluster's resources: see `ray status`"
        )
    if not job.uses_tf_distribute:  # whose groups are whole or nothing
        wait_for(membership.expect.remote(there))


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
