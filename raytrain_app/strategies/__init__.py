"""How workers are started and talk, one file or folder a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from raytrain_app.elastic.membership import Membership
from raytrain_app.job import Job
from raytrain_app.storage.rundir import RunDirectory
from raytrain_app.strategies.worker import WorkerSpec


class Services(Protocol):
    """What a strategy runs beside its workers; the driver starts it before them and ends it after them."""

    def scale(self, servers: int) -> None:
        """Asks for another number of servers."""
        ...

    def status(self) -> list[dict[str, Any]]:
        """What runs, for status.json."""
        ...

    def close(self) -> None:
        """Ends all of it."""
        ...


class NoServices:
    """Of strategies whose workers need nothing else."""

    def scale(self, servers: int) -> None:
        pass

    def status(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        pass


def train_body(job: Job) -> Callable[[WorkerSpec], None]:
    """What each worker of the job's pools runs."""
    return {"allreduce": _allreduce, "parameter_server": _parameter_server, "model_parallel": _model_parallel}[job.strategy.name]


def membership_kind(job: Job) -> type[Membership]:
    """The actor that knows the job's workers."""
    if job.strategy.name == "parameter_server":
        from raytrain_app.strategies.parameter_server.coordinator import Coordinator

        return Coordinator
    if job.uses_tf_distribute:
        from raytrain_app.strategies.tf_distribute import GroupMembership

        return GroupMembership
    return Membership


def has_services(job: Job) -> bool:
    """Whether the job's strategy runs something beside its workers."""
    return job.strategy.name == "parameter_server"


def start_services(job: Job, spec: WorkerSpec, num_rows: int) -> Services:
    """Starts what the job's strategy runs beside its workers.

    Args:
        job: what is trained.
        spec: what a worker gets.
        num_rows: training rows.
    """
    if has_services(job):
        from raytrain_app.strategies.parameter_server.services import ParameterServers

        return ParameterServers(spec, num_rows)
    return NoServices()


def prepare_resume(job: Job, directory: RunDirectory) -> None:
    """Makes the files of a run fit the checkpoint that it will be resumed from, where the strategy needs it."""
    if job.strategy.name == "parameter_server":
        from raytrain_app.strategies.parameter_server.services import forget_what_will_be_done_again

        forget_what_will_be_done_again(job, directory)


def _allreduce(spec: WorkerSpec) -> None:
    from raytrain_app.strategies.allreduce import train
    from raytrain_app.strategies.worker import run_worker

    run_worker(spec, train)


def _parameter_server(spec: WorkerSpec) -> None:
    from raytrain_app.strategies.parameter_server.worker import train
    from raytrain_app.strategies.worker import run_worker

    run_worker(spec, train)


def _model_parallel(spec: WorkerSpec) -> None:
    from raytrain_app.strategies.model_parallel import train
    from raytrain_app.strategies.worker import run_worker

    run_worker(spec, train)
