"""`raytrain submit`: a job to a Ray cluster, with what it needs, followed to its end."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raytrain_app.cli.run import Debug, JobFile, Name, Set
from raytrain_app.errors import EXIT_INTERRUPTED, JobError, LostJobError

if TYPE_CHECKING:
    from raytrain_app.cluster.jobs import JobClient
    from raytrain_app.job import Job

LAST_LINES = 10
"""Of what Ray says about a job, whose end has the reason."""


def submit(
    job_file: JobFile,
    address: Annotated[str, typer.Option(metavar="URL", help="The cluster's job server, such as http://localhost:8265.")],
    overrides: Set = None,
    name: Name = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run of this name where it stopped.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the job, or print its id and go.")] = True,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME", help="Pass this environment variable on. Can be repeated; others see it too."),
    ] = None,
    retries: Annotated[int, typer.Option(min=0, metavar="N", help="Submit again when the cluster loses the job.")] = 0,
    debug: Debug = False,
) -> None:
    """Run a job on a cluster: send the current folder, follow the output, end with the job's own exit code.

    Ctrl-C ends the following, not the job. Exit code 5 means that the cluster was lost and with it how the job ended.

    Example: [bold]raytrain submit job.yaml --address http://localhost:8265 --set storage=gs://my-bucket/runs[/bold]
    """
    from raytrain_app.job import load_job

    job = load_job(job_file, overrides or (), name)
    _choose_authentication()

    from raytrain_app.checks import model_problems
    from raytrain_app.cluster.package import describe, plan_package
    from raytrain_app.task import load_task

    task = load_task(job.task, job.data.classes)
    if problems := list(model_problems(job, task)):
        raise JobError("\n".join(problems))
    variables = _variables(env or ())
    package = plan_package(job, Path.cwd())

    from raytrain_app.cluster.jobs import connect
    from raytrain_app.cluster.package import write_package

    client = connect(address)
    for line in describe(package):
        typer.echo(line, err=True)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / f"{job.name}.zip"
        write_package(package, job, archive)
        job_id = _start(client, archive, job, "--resume" if resume else "", variables)
        if not wait:
            typer.echo(job_id)
            return
        for left in reversed(range(retries + 1)):
            code = _follow(client, job_id, last=left == 0)
            if code is not None:
                raise typer.Exit(code)
            client = connect(address)
            job_id = _start(client, archive, job, "--resume-if-begun", variables)


def _start(client: JobClient, archive: Path, job: Job, option: str, variables: dict[str, str]) -> str:
    from raytrain_app.cluster.jobs import submit_package
    from raytrain_app.cluster.package import JOB_FILE

    command = ["python", "-m", "raytrain_app", "run", JOB_FILE, *filter(None, [option])]
    job_id = submit_package(client, archive, command, job.name, variables)
    typer.echo(f"submitted as {job_id}", err=True)
    return job_id


def _follow(client: JobClient, job_id: str, last: bool) -> int | None:
    """Shows the job's output to its end.

    Returns:
        The exit code, None if the cluster lost the job and this is not the `last` try.

    Raises:
        LostJobError: how the job ended is not known, and this is the last try.
    """
    from raytrain_app.cluster.jobs import follow

    try:
        ended = follow(client, job_id, lambda text: typer.echo(text, nl=False), lambda text: typer.echo(text, err=True))
    except KeyboardInterrupt:
        typer.echo(f"job {job_id} goes on: `ray job logs {job_id} --follow` shows it, `ray job stop {job_id}` ends it", err=True)
        return EXIT_INTERRUPTED
    except LostJobError as error:
        if last:
            raise
        typer.echo(str(error), err=True)
        return None
    if ended.lost_driver:
        said = ended.message.strip().splitlines()[-LAST_LINES:]
        typer.echo("\n".join(["the job's driver did not end by itself:", *said]), err=True)
    return None if ended.lost_driver and not last else ended.code


def _choose_authentication() -> None:
    """Sends a token where there is one and nobody said not to; Ray reads this when it is imported."""
    if "RAY_AUTH_MODE" not in os.environ and ("RAY_AUTH_TOKEN" in os.environ or Path("~/.ray/auth_token").expanduser().exists()):
        os.environ["RAY_AUTH_MODE"] = "token"


def _variables(names: list[str] | tuple[str, ...]) -> dict[str, str]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise JobError(f"--env: {', '.join(missing)} is not set here; set it, or leave the option out")
    return {name: os.environ[name] for name in names}
