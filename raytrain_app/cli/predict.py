"""`raytrain predict`: what a trained model takes pictures for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from raytrain_app.cli.control import Run, Storage
from raytrain_app.cli.evaluate import Address, Checkpoint, Workers
from raytrain_app.cli.run import Debug
from raytrain_app.errors import EXIT_WRONG_INPUT

if TYPE_CHECKING:
    from raytrain_app.data.files import File
    from raytrain_app.inference.pictures import Invert
    from raytrain_app.inference.prediction import Prediction
    from raytrain_app.inference.trained import Trained
    from raytrain_app.storage.folder import Folder

MANY, WORKERS = 2000, 64
"""Pictures from which on it is quicker to start Ray than to do without, and the most workers then, if there is room."""


class InvertName(str, Enum):
    """The values of `--invert`."""

    auto = "auto"
    always = "always"
    never = "never"


def predict(
    run: Run,
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE...",
            help="Pictures, .npy files, folders, globs or URIs; for a language model, texts to go on with.",
            show_default=False,
        ),
    ],
    storage: Storage = "runs",
    checkpoint: Checkpoint = "latest",
    invert: Annotated[
        InvertName, typer.Option("--invert", help="Swap light and dark; auto does so where the border is bright.")
    ] = InvertName.auto,
    workers: Workers = None,
    address: Address = None,
    sample: Annotated[
        int | None, typer.Option(metavar="SEED", help="Draw the characters that follow a text by their probability.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line for each picture.")] = False,
    debug: Debug = False,
) -> None:
    """Predict the class of pictures, and say what was done to make them look like the training data; or go on with texts.

    Pictures that cannot be used are named on stderr, the others are predicted; the exit code is then 2.

    Example: [bold]raytrain predict mnist-torch digit.png scans/ --json[/bold]
    """
    from raytrain_app.cli.quiet import quiet_libraries
    from raytrain_app.inference.prediction import find_pictures
    from raytrain_app.storage.requests import find_run

    folder, bad = find_run(run, storage), 0
    with quiet_libraries(debug=debug) as terminal:
        from raytrain_app.inference.continuation import continue_texts, reads_texts
        from raytrain_app.inference.trained import load_trained

        trained = load_trained(folder, checkpoint)
        for message in trained.messages:
            typer.echo(message, file=terminal)
        if reads_texts(trained.task):
            for found in continue_texts(trained, images, sample):
                bad += found.error is not None
                if as_json:
                    typer.echo(json.dumps(vars(found)))
                elif found.error is None:
                    typer.echo(f"{found.text}|{found.continuation}")
                else:
                    typer.echo(found.error, file=terminal)
            raise typer.Exit(EXIT_WRONG_INPUT if bad else 0)
        files = find_pictures(images)
        if workers is None and (address or len(files) > MANY):
            workers = WORKERS
        for prediction in _predictions(trained, folder, files, invert.value, workers, address):
            bad += prediction.error is not None
            if as_json:
                typer.echo(json.dumps(vars(prediction)))
            elif prediction.error is None:
                typer.echo(_line(prediction))
            else:
                typer.echo(prediction.error, file=terminal)
    if bad:
        raise typer.Exit(EXIT_WRONG_INPUT)


def _predictions(
    trained: Trained, folder: Folder, files: Sequence[File], invert: Invert, workers: int | None, address: str | None
) -> Iterator[Prediction]:
    from raytrain_app.inference import prediction

    if workers is None:
        yield from prediction.predict(trained, files, invert)
        return
    from raytrain_app.inference.cluster import workers_there
    from raytrain_app.session import ray_session

    with ray_session(address):
        there = workers_there(trained.job, workers)
        yield from prediction.predict_on_cluster(trained, folder.uri, files, there, invert)


def _line(prediction: Prediction) -> str:
    """The picture, its class, how sure that is, what else it may be, and what was done to it."""
    from raytrain_app.report.words import percent

    assert prediction.probability is not None
    others = sorted(prediction.probabilities.items(), key=lambda item: -item[1])[1:2]
    second = f", else {others[0][0]} ({percent(others[0][1])})" if others and others[0][1] >= 0.001 else ""
    done = f"  [{'; '.join(prediction.done)}]" if prediction.done else ""
    return f"{prediction.image}: {prediction.prediction} ({percent(prediction.probability)}{second}){done}"
