"""`raytrain init`: a starter project that trains as it is."""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer

from raytrain_app.errors import StorageError

FILES = ("job.yaml", "task.py")


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")] = Path("."),
    framework: Annotated[Literal["torch", "tensorflow"], typer.Option(help="What the task is written for.")] = "torch",
) -> None:
    """Write a starter job file and task file that train as they are.

    Example: [bold]raytrain init my-project[/bold]
    """
    taken = [str(folder / name) for name in FILES if (folder / name).exists()]
    if taken:
        raise StorageError(f"{' and '.join(taken)} exist already and are left alone; name another folder: raytrain init FOLDER")
    starter = resources.files("raytrain_app.cli") / "starter" / framework
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write((starter / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{error.filename or folder}: cannot be written: {error.strerror}; name another folder") from error
    typer.echo(f"Wrote {folder / 'job.yaml'} and {folder / 'task.py'}. Next:")
    if folder != Path("."):
        typer.echo(f"  cd {shlex.quote(str(folder))}")
    typer.echo("  raytrain check job.yaml   # what it comes to")
    typer.echo("  raytrain run job.yaml     # trains; `raytrain watch` in another terminal shows more")
    typer.echo("  raytrain report           # what happened, as a page")
