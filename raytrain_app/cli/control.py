"""`raytrain status`, `scale` and `stop`: looking at a running job and changing it, from any process that sees its storage."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raytrain_app.errors import ClusterError, JobError

if TYPE_CHECKING:
    from raytrain_app.job import Job
    from raytrain_app.job.model import Workers


def runs_here(incomplete: str) -> list[str]:
    """Names of the runs below ./runs, for the shell's completion."""
    return sorted(path.parent.name for path in Path("runs").glob("*/job.yaml") if path.parent.name.startswith(incomplete))


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="The run: its directory, or its name below --storage.", show_default=False, autocompletion=runs_here
    ),
]
RunOrNewest = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="The run: its directory, or its name below --storage. Without it: the newest there.",
        show_default=False,
        autocompletion=runs_here,
    ),
]
Storage = Annotated[str, typer.Option("--storage", metavar="URI", help="Where to look for a run that is given by name.")]
WAIT_S = 15.0


def status(
    run: RunOrNewest = None,
    storage: Storage = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Show how far a run is and who trains.

    Example: [bold]raytrain status mnist-torch[/bold]
    """
    from raytrain_app.report.state import read_state, state_lines
    from raytrain_app.storage.requests import find_run

    state = read_state(find_run(run, storage))
    if as_json:
        typer.echo(json.dumps(state.to_json()))
        return
    for line in state_lines(state):
        typer.echo(line)


def scale(
    run: Run,
    workers: Annotated[
        str | None, typer.Argument(metavar="N|MIN..MAX", help="How many workers the run may have now.", show_default=False)
    ] = None,
    servers: Annotated[int | None, typer.Option(help="How many parameter servers the run has now.", show_default=False)] = None,
    storage: Storage = "runs",
) -> None:
    """Change how many workers or parameter servers a running job has; nothing restarts.

    Example: [bold]raytrain scale mnist-torch 1..8[/bold]
    """
    from raytrain_app.storage.requests import Request, find_run
    from raytrain_app.storage.rundir import RunDirectory

    if (workers is None) == (servers is None):
        raise JobError("found nothing to change, or two things; expected N, MIN..MAX or --servers N")
    if servers is not None and servers < 1:
        raise JobError(f"--servers: found {servers}; expected 1 or more")
    folder = find_run(run, storage)
    job = RunDirectory.open(folder.uri).read_job()
    if workers is not None:
        limits = _limits(workers, job)
        _ask(folder, Request(kind="scale", least=limits.min, most=limits.max))
        workers_text = f"{limits} worker{'' if limits.max == 1 else 's'}"
        typer.echo(f"{job.name} may have {workers_text} now; `raytrain status {run}` shows who trains")
    elif servers is not None:
        if job.strategy.name != "parameter_server":
            raise JobError(f"--servers: {job.name} has no parameter servers; its strategy is {job.strategy.name}")
        _ask(folder, Request(kind="servers", servers=servers))
        typer.echo(f"{job.name} will have {servers} server{'' if servers == 1 else 's'} as soon as no gradient is under way")


def _limits(workers: str, job: Job) -> Workers:
    """What the user wrote, if the run can have so many workers."""
    from pydantic import ValidationError

    from raytrain_app.job.model import Workers

    try:
        limits = Workers.model_validate(int(workers) if workers.isdecimal() else workers)
    except ValidationError:
        raise JobError(f"N|MIN..MAX: found {workers!r}; expected a number of at least 1, or min..max such as 1..4") from None
    if limits.max > job.most_workers:
        raise JobError(
            f"at most {job.most_workers} workers can share a batch of this run, whose job says train.virtual_shards: "
            f"{job.train.virtual_shards}; it cannot be changed while the run goes on"
        )
    if limits.min % job.replica_workers or limits.max % job.replica_workers:
        raise JobError(
            f"N|MIN..MAX: found {limits}, but {job.replica_workers} workers hold a replica of this run together; expected "
            f"multiples of {job.replica_workers}"
        )
    return limits


def stop(run: Run, storage: Storage = "runs") -> None:
    """Stop a running job: it finishes the step, writes a checkpoint, and can be resumed.

    Example: [bold]raytrain stop mnist-torch[/bold]
    """
    from raytrain_app.storage.requests import Request, find_run

    folder = find_run(run, storage)
    _ask(folder, Request(kind="stop"))
    typer.echo("stopping; `raytrain run` with --resume goes on from there")


def _ask(folder: Any, request: Any) -> None:
    """Posts a request and waits until the run's driver has taken it up."""
    from raytrain_app.storage.requests import Requests

    if folder.exists("result.json"):
        raise ClusterError(
            f"the run in {folder.at('')} has ended, and cannot be changed; `raytrain run` with another --name starts a new one"
        )
    requests = Requests(folder)
    name, deadline_s = requests.post(request), time.monotonic() + WAIT_S
    while requests.waits(name):
        if time.monotonic() > deadline_s:
            requests.withdraw(name)
            raise ClusterError(
                f"nobody answered for the run in {folder.at('')} within {WAIT_S:g} s; "
                "its driver is gone. `raytrain run` with --resume goes on from the last checkpoint"
            )
        time.sleep(0.2)
