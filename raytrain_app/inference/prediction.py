"""What a trained model takes pictures for, one by one or a folder full of them over the cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytrain_app.data.files import File, find_files
from raytrain_app.errors import DataError
from raytrain_app.inference.pictures import MOST_BYTES, BadPictureError, Invert, Row, rows_of
from raytrain_app.inference.trained import Trained, load_trained
from raytrain_app.storage.folder import Folder

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".npy")
GROUP = 64
"""Pictures that are predicted at a time."""


@dataclass
class Prediction:
    """What one picture is taken for.

    Attributes:
        image: path or URI; with "[3]" behind it for row 3 of an array file.
        prediction: the class as the data's labels call it, None where the picture could not be used.
        probability: of that class.
        probabilities: of each class, by its label.
        done: what was done to make the picture a row for the model.
        error: why the picture could not be used.
    """

    image: str
    prediction: int | None = None
    probability: float | None = None
    probabilities: dict[str, float] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    error: str | None = None


def find_pictures(names: Sequence[str]) -> list[File]:
    """The files that paths, folders, globs and URIs mean; of a folder's files those that may be pictures.

    Raises:
        DataError: one of them means nothing.
    """
    files: list[File] = []
    for name in names:
        try:
            found = find_files(name)
        except DataError as error:
            raise DataError(str(error).replace("data.source: ", "")) from None
        likely = [file for file in found if file.name.lower().endswith(SUFFIXES)]
        if os.path.isdir(os.path.expanduser(name)) and not likely:
            raise DataError(f"{name} has {len(found):,} files and none ends with {', '.join(SUFFIXES)}")
        files += likely or found
    return files


def predict(trained: Trained, files: Sequence[File], invert: Invert = "auto") -> Iterator[Prediction]:
    """Predicts in this process, in the order of the files."""
    for first in range(0, len(files), GROUP):
        yield from _predict_group(trained, files[first : first + GROUP], invert)


def predict_on_cluster(
    trained: Trained, directory: str, files: Sequence[File], workers: int, invert: Invert = "auto"
) -> Iterator[Prediction]:
    """The same over Ray Data, with Ray up. Files of this machine's disks are read on this machine only.

    Args:
        trained: the model, for its job and checkpoint; the workers build their own.
        directory: URI of the run directory, which all nodes must reach.
        files: what to predict.
        workers: the most to start.
        invert: see `pictures.rows_of`.

    Raises:
        RaytrainError: a worker could not build the model, or its code failed.
    """
    import ray

    from raytrain_app.inference.cluster import quiet_data

    resources = {name: amount for name, amount in trained.job.scaling.resources_per_worker.items() if amount}
    here = {} if all(file.uri for file in files) else {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    groups = -(-len(files) // GROUP)
    predicted = ray.data.range(groups, override_num_blocks=groups).map_batches(
        Predictor,
        fn_constructor_args=(directory, trained.checkpoint, list(files), invert),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(workers, groups)),
        num_cpus=resources.pop("CPU", 0),
        num_gpus=resources.pop("GPU", 0),
        resources=resources or None,
        label_selector=here,
    )
    predicted.context.execution_options.preserve_order = True
    with quiet_data():
        for row in predicted.iter_rows():
            yield from row["predictions"]


class Predictor:
    """A worker: builds the model from the run directory once, then predicts the groups of files it is handed."""

    def __init__(self, directory: str, checkpoint: str, files: list[File], invert: Invert) -> None:
        self._trained = load_trained(Folder.open(directory), checkpoint)
        self._files, self._invert = files, invert

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, Any]:
        done = np.empty(len(rows["id"]), object)
        for place, group in enumerate(rows["id"].tolist()):
            done[place] = _predict_group(self._trained, self._files[group * GROUP : (group + 1) * GROUP], self._invert)
        return {"predictions": done}


def _predict_group(trained: Trained, files: Sequence[File], invert: Invert) -> list[Prediction]:
    """Reads a group of files and predicts all their rows together."""
    found: list[tuple[Prediction, np.ndarray | None]] = []
    for file in files:
        try:
            found += [_begin(file, row) for row in _read(trained, file, invert)]
        except BadPictureError as error:
            found.append((Prediction(file.name, error=f"{file.name} {error}"), None))
    rows = [x for _, x in found if x is not None]
    if rows:
        shares = iter(trained.probabilities(np.stack(rows)))
        for prediction, x in found:
            if x is not None:
                _finish(trained, prediction, next(shares))
    return [prediction for prediction, _ in found]


def _read(trained: Trained, file: File, invert: Invert) -> list[Row]:
    if file.size > MOST_BYTES:
        raise BadPictureError(f"has {file.size:,} bytes; expected at most {MOST_BYTES:,}")
    try:
        with file.open() as stream:
            data = stream.read()
    except OSError as error:
        raise BadPictureError(f"cannot be read: {error.strerror or error}") from None
    return rows_of(file.name, data, trained.task.columns, trained.task.pictures(trained.source), invert)


def _begin(file: File, row: Row) -> tuple[Prediction, np.ndarray | None]:
    return Prediction(file.name if row.part is None else f"{file.name}[{row.part}]", done=row.done), row.x


def _finish(trained: Trained, prediction: Prediction, shares: np.ndarray) -> None:
    best = int(shares.argmax())
    prediction.prediction, prediction.probability = trained.label(best), float(shares[best])
    prediction.probabilities = {str(trained.label(number)): float(share) for number, share in enumerate(shares)}
