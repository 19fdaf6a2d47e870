"""`raytrain run` and `raytrain check`: the same job file, trained or only looked at."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Annotated

import typer

from raytrain_app.errors import JobError

JobFile = Annotated[str, typer.Argument(metavar="JOB", help="The job file.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job, such as optimizer.lr=0.01. Can be repeated."),
]
Name = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run instead of the job's own.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Ray's own output.")]


def run(
    job_file: JobFile,
    overrides: Set = None,
    name: Name = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run of this name where it stopped.")] = False,
    resume_if_begun: Annotated[
        bool,
        typer.Option("--resume-if-begun", help="As --resume if there is such a run, else start it; for what starts jobs again."),
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="The Ray cluster to train on. Without it: that of RAY_ADDRESS, else this machine."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the result.")] = False,
    debug: Debug = False,
) -> None:
    """Train a job and print the result.

    Ctrl-C once finishes the step, writes a checkpoint and ends with exit code 130; --resume goes on from there.

    Example: [bold]raytrain run job.yaml --set train.epochs=5 --name longer[/bold]
    """
    from raytrain_app.job import load_job

    job = load_job(job_file, overrides or (), name)

    # Ray and torch take seconds to import: only after the job file is known to be right.
    from rich.console import Console

    from raytrain_app.cli.quiet import quiet_terminal
    from raytrain_app.report.terminal import next_lines, result_lines, shown
    from raytrain_app.report.updates import Update

    with quiet_terminal(job.storage, job.name, debug=debug) as terminal:
        # With --debug others print too, which a live bar does not bear.
        console = Console(file=terminal, force_terminal=False if debug else None)
        with shown(quiet=quiet, epochs=job.train.epochs, console=console) as show, ExitStack() as stack:
            from raytrain_app.session import importing, ray_session

            show(Update("phase", "starting Ray"))
            with importing("raytrain_app.runner"):  # which loads torch, and takes about as long as Ray does to start
                stack.enter_context(ray_session(address))
            from raytrain_app import runner
            from raytrain_app.storage.rundir import RunDirectory

            resume = resume or (resume_if_begun and RunDirectory.begun(job))
            result = runner.run(job, resume=resume, address=address, on_update=show)
    for line in result_lines(result.record, result.directory):
        typer.echo(line)
    if sys.stdout.isatty() and not quiet:
        for line in ("", *next_lines(result.directory, job.storage)):
            typer.echo(line)


def check(
    job_file: JobFile,
    overrides: Set = None,
    name: Name = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="CLUSTER", help="A cluster file: whether the job fits, and its cost an hour.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Check everything that can be checked without starting, and print the resolved plan.

    Example: [bold]raytrain check job.yaml --set scaling.workers=1..8 --cluster cluster.yaml[/bold]
    """
    from raytrain_app.job import load_job

    job = load_job(job_file, overrides or (), name)

    from raytrain_app.checks import find_problems, storage_problems
    from raytrain_app.cli.plan import plan_lines
    from raytrain_app.cluster.document import load_cluster
    from raytrain_app.cluster.fit import fit_problems
    from raytrain_app.task import load_task

    task = load_task(job.task, job.data.classes)
    file = None if cluster is None else load_cluster(cluster)
    problems = [*find_problems(job, task), *(storage_problems(job) if file is None else fit_problems(job, file))]
    if problems:
        raise JobError("\n  ".join([f"{job_file}: {len(problems)} problem{'s' if len(problems) > 1 else ''}", *problems]))
    for line in plan_lines(job, task, file):
        typer.echo(line)
