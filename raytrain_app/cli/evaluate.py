"""`raytrain evaluate`: what a trained model gets right and wrong on rows with labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raytrain_app.cli.control import RunOrNewest, Storage
from raytrain_app.cli.run import Debug

if TYPE_CHECKING:
    pass

Checkpoint = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        metavar="latest|best|STEP",
        help="Which weights; the latest are those of result.json after the end.",
        autocompletion=lambda: ["latest", "best"],
    ),
]
Workers = Annotated[
    int | None, typer.Option("--workers", metavar="N", min=1, help="Compute on Ray with up to N workers instead of here.")
]
Address = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="The Ray cluster for --workers. Without it: that of RAY_ADDRESS, else this machine."),
]
MATRIX_CLASSES = 20
"""Classes up to which the confusion matrix is printed."""


class SplitName(str, Enum):
    """The values of `--split`."""

    test = "test"
    validation = "validation"
    train = "train"


def evaluate(
    run: RunOrNewest = None,
    storage: Storage = "runs",
    split: Annotated[SplitName, typer.Option("--split", help="Which of the run's own rows.")] = SplitName.test,
    source: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Other rows with labels: a path, a glob, a URI or a known data set.")
    ] = None,
    checkpoint: Checkpoint = "latest",
    workers: Workers = None,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
    debug: Debug = False,
) -> None:
    """Measure a trained model: loss and accuracy, per class, and what it confuses.

    The numbers are exact, and the same for any number of workers.

    Example: [bold]raytrain evaluate mnist-torch --split validation --checkpoint best[/bold]
    """
    from raytrain_app.cli.quiet import quiet_libraries
    from raytrain_app.storage.requests import find_run

    folder = find_run(run, storage)
    with quiet_libraries(debug=debug):
        from raytrain_app.inference.evaluations import evaluate_run
        from raytrain_app.inference.trained import load_trained

        trained = load_trained(folder, checkpoint)
        found = evaluate_run(trained, folder, split.value, source, workers or (1 if address else None), address)
    for message in trained.messages:
        typer.echo(message, err=True)
    if as_json:
        typer.echo(json.dumps({**found, "mistakes": [{**m, "image": None} for m in found["mistakes"]]}))
        return
    typer.echo(f"run        {trained.job.name}")
    for line in _lines(found):
        typer.echo(line)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    import numpy as np

    from raytrain_app.report.confusion import confused_pairs
    from raytrain_app.report.words import percent

    yield f"weights    {found['checkpoint']}, sha256 {found['weights_sha256'][:16]}..."
    yield f"rows       {found['rows']:,} {found['split']} rows of {found['source']}"
    right = round(found["correct"])  # of a text, a row may be right in part
    yield f"accuracy   {percent(found['accuracy'], 2)}, {right:,} right and {found['rows'] - right:,} wrong"
    yield f"loss       {found['loss']:.6g}"
    for name, value in found["metrics"].items():
        yield f"{name:<10} {value:.6g}"
    if found["classes"] is None:
        return
    if found["confusion"] is not None and (pairs := confused_pairs(np.array(found["confusion"]), 3)):
        yield f"confused   {pairs}"
    yield ""
    yield f"{'class':>5} {'rows':>8} {'precision':>10} {'recall':>8} {'F1':>8}"
    for row in found["classes"]:
        shares = ["-" if row[name] is None else percent(row[name]) for name in ("precision", "recall", "f1")]
        yield f"{row['label']:>5} {row['rows']:>8,} {shares[0]:>10} {shares[1]:>8} {shares[2]:>8}"
    if found["confusion"] is not None and len(found["confusion"]) <= MATRIX_CLASSES:
        yield from _matrix(found)


def _matrix(found: dict[str, Any]) -> Iterator[str]:
    labels = [str(row["label"]) for row in found["classes"]]
    width = max(len(f"{count:,}") for row in found["confusion"] for count in row)
    yield ""
    yield f"{'true':>5}  taken for"
    yield f"{'':>5} " + " ".join(label.rjust(width) for label in labels)
    for label, row in zip(labels, found["confusion"], strict=True):
        yield f"{label:>5} " + " ".join((f"{count:,}" if count else "·").rjust(width) for count in row)
