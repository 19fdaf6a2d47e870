"""`raytrain watch`: a run on the whole terminal, live or played back."""

from __future__ import annotations

from typing import Annotated

import typer

from raytrain_app.cli.control import RunOrNewest, Storage
from raytrain_app.cli.run import Debug

LINE_EVERY_S = 5.0


def watch(
    run: RunOrNewest = None,
    storage: Storage = "runs",
    replay: Annotated[
        float, typer.Option("--replay", metavar="SECONDS", min=0, help="How long to play back a run that has ended; 0: not.")
    ] = 8.0,
    debug: Debug = False,
) -> None:
    """Watch a run: progress, curves, workers and disruptions, until it ends. Ctrl-C ends the watching and not the run.

    Needs nothing but the run directory, so it works wherever that can be read.

    Example: [bold]raytrain watch mnist-torch[/bold]
    """
    from rich.console import Console

    from raytrain_app.report.screen import lines_of
    from raytrain_app.report.watch import views
    from raytrain_app.report.watch import watch as watch_run
    from raytrain_app.storage.requests import find_run

    folder, console = find_run(run, storage), Console()
    if console.is_terminal and not console.is_dumb_terminal:
        watch_run(folder, console, replay)
        return
    for line in lines_of(views(folder), LINE_EVERY_S):
        typer.echo(line)
