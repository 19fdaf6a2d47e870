"""`raytrain list`: the runs of a storage."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from raytrain_app.cli.run import Debug
from raytrain_app.errors import RaytrainError, StorageError

if TYPE_CHECKING:
    from raytrain_app.report.state import RunState


def list_runs(
    storage: Annotated[str, typer.Argument(metavar="STORAGE", help="A folder, gs:// or s3:// that holds runs.")] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
    debug: Debug = False,
) -> None:
    """List the runs of a storage, the one that was last heard of first.

    Example: [bold]raytrain list gs://my-bucket/runs[/bold]
    """
    from raytrain_app.report.state import read_state
    from raytrain_app.storage.folder import Folder

    folder = Folder.open(storage)
    if not folder.exists() and folder.local_path is not None:
        raise StorageError(f"there is no folder {folder.at('')}; name the `storage` of your jobs")
    states = []
    for name in folder.list():
        child = folder.child(name)
        if child.exists("job.yaml"):
            try:
                states.append(read_state(child))
            except RaytrainError as error:
                # One damaged run must not hide the others.
                typer.echo(f"{child.at('')}: {error}", err=True)
    states.sort(key=lambda state: -(state.updated or 0.0))
    if as_json:
        typer.echo(json.dumps([state.to_json() for state in states]))
    elif states:
        _print(states)
    else:
        typer.echo(f"no runs in {folder.at('')}")


def _print(states: list[RunState]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from raytrain_app.report.screen import STATUS_STYLES
    from raytrain_app.report.words import ago, percent

    table = Table("run", "status", box=None, pad_edge=False, header_style="dim")
    for name in ("step", "val acc", "test acc", "workers", "samples/s", "updated"):
        table.add_column(name, justify="right")
    for state in states:
        accuracies = [state.metrics.get(name) for name in ("val_accuracy", "test_accuracy")]
        table.add_row(
            state.name,
            Text(state.status.replace("_", " "), STATUS_STYLES.get(state.status, "")),
            f"{state.step:,}" + (f"/{state.total_steps:,}" if state.total_steps else ""),
            *("-" if value is None else percent(value) for value in accuracies),
            str(state.workers),
            "-" if state.samples_per_s is None else f"{state.samples_per_s:,.0f}",
            "-" if state.updated is None else f"{ago(time.time() - state.updated)} ago",
        )
    Console(highlight=False).print(table)
