"""`raytrain audit`: the proof that every sample counted exactly once."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from raytrain_app.cli.control import RunOrNewest, Storage
from raytrain_app.errors import TrainingError


def audit(
    run: RunOrNewest = None,
    storage: Storage = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Count how often each sample was applied in each epoch; anything but once ends with exit code 4.

    The run must have been made with `audit: true`.

    Example: [bold]raytrain audit mnist-torch[/bold]
    """
    from raytrain_app.storage.audit import audit_run, summary
    from raytrain_app.storage.requests import find_run

    epochs = audit_run(find_run(run, storage))
    if as_json:
        typer.echo(json.dumps([epoch.to_json() for epoch in epochs]))
    else:
        typer.echo("\n".join(summary(epochs)))
    wrong = [str(epoch.epoch) for epoch in epochs if not epoch.exact]
    if wrong:
        raise TrainingError(
            f"samples were not applied exactly once in epoch {', '.join(wrong)}; please report this with the run directory"
        )
