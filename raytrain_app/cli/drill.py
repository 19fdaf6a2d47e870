"""`raytrain drill`: a job under real faults, compared with itself undisturbed."""

from __future__ import annotations

from typing import Annotated

import typer

from raytrain_app.cli.run import JobFile, Name, Set
from raytrain_app.errors import TrainingError


def drill(
    job_file: JobFile,
    overrides: Set = None,
    name: Name = None,
    kill: Annotated[int, typer.Option(min=0, help="Workers to kill (SIGKILL).")] = 0,
    stop: Annotated[int, typer.Option(min=0, help="Workers to hang (SIGSTOP); noticed after failure.heartbeat_s.")] = 0,
    drain: Annotated[int, typer.Option(min=0, help="Nodes to drain, as a spot notice does, and then to lose.")] = 0,
    node: Annotated[int, typer.Option(min=0, help="Nodes to lose without notice.")] = 0,
    resize: Annotated[int, typer.Option(min=0, help="Changes of the number of workers.")] = 0,
    server: Annotated[int, typer.Option(min=0, help="Parameter servers to kill.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the random schedule.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Ray nodes to make on this machine.")] = 2,
    address: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Use a running cluster instead.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the findings.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and Ray's own output.")] = False,
) -> None:
    """Train under a random schedule of real faults, then without, and compare; exit code 4 when a promise is broken.

    Example: [bold]raytrain drill job.yaml --kill 3 --node 1 --resize 2 --seed 7[/bold]
    """
    from raytrain_app.job import load_job

    job = load_job(job_file, overrides or (), name)

    from rich.console import Console

    from raytrain_app.cli.quiet import quiet_terminal
    from raytrain_app.report.terminal import shown

    counts = {"kill": kill, "stop": stop, "drain": drain, "node": node, "resize": resize, "server": server}
    with (
        quiet_terminal(job.storage, f"{job.name}-drill-{seed}-disturbed", debug=debug) as terminal,
        shown(quiet=quiet, epochs=job.train.epochs, console=Console(file=terminal, force_terminal=False)) as show,
    ):
        from raytrain_app.drill import drill as run_drill

        result = run_drill(job, counts, seed, address=address, num_nodes=nodes, on_update=show)
    for line in result.lines():
        typer.echo(line)
    if result.broken:
        raise TrainingError(f"{len(result.broken)} broken promises; please report this with the two run directories")
