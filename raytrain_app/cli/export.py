"""`raytrain export`: a trained model in a format that others read."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from raytrain_app.cli.control import RunOrNewest, Storage
from raytrain_app.cli.evaluate import Checkpoint
from raytrain_app.cli.run import Debug


class FormatName(str, Enum):
    """The values of `--to`."""

    safetensors = "safetensors"
    torch = "torch"
    onnx = "onnx"
    keras = "keras"
    saved_model = "saved_model"


def export(
    to: Annotated[FormatName, typer.Option("--to", help="The format.")],
    run: RunOrNewest = None,
    storage: Storage = "runs",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="Where to write, instead of the run's name in this folder.")
    ] = None,
    checkpoint: Checkpoint = "latest",
    source: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Rows to compare on, instead of the run's own test rows.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a trained model for use elsewhere; it is loaded back and must predict the same before it counts as done.

    Example: [bold]raytrain export mnist-torch --to onnx --checkpoint best[/bold]
    """
    from raytrain_app.cli.quiet import quiet_libraries
    from raytrain_app.storage.requests import find_run

    folder = find_run(run, storage)
    with quiet_libraries(debug=debug):
        from raytrain_app.data.one_split import read_split
        from raytrain_app.inference.exports import FORMATS, export
        from raytrain_app.inference.trained import load_trained

        trained = load_trained(folder, checkpoint, on_cpu=True)
        path = out or Path(f"{trained.job.name}{FORMATS[to.value].suffix or '-saved_model'}")
        x, _ = read_split(trained.job, trained.task, "test", source)
        proof = export(trained, to.value, path, x)
    for message in trained.messages:
        typer.echo(message, err=True)
    typer.echo(f"{path}: {FORMATS[to.value].about}")
    typer.echo(
        f"{trained.checkpoint}, loaded back and compared on {proof.rows:,} rows: the same predictions, "
        f"outputs differ by at most {proof.largest_difference:.2g}"
    )
