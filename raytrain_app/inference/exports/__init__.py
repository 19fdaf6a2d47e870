"""Taking a trained model away, in a format that needs no raytrain, and proof that what was written predicts the same.

Each format is a file with `write(trained, path)` and `outputs(trained, path, x)`, which loads what was written and computes
with it. Only after its predictions have been compared with the original's on real rows is an export given its name.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raytrain_app.errors import JobError, StorageError, TrainingError
from raytrain_app.inference.trained import Trained


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        module: in this package, the one that writes it.
        suffix: of its files; empty for a folder.
        frameworks: that can write it.
        about: what the reader gets.
    """

    module: str
    suffix: str
    frameworks: tuple[str, ...]
    about: str


FORMATS = {
    "safetensors": Format("weights", ".safetensors", ("torch", "tensorflow"), "the weights and buffers by name"),
    "torch": Format("torch_program", ".pt2", ("torch",), "a program for torch.export.load; it takes rows as they are stored"),
    "onnx": Format("onnx_model", ".onnx", ("torch",), "an ONNX model; it takes rows as they are stored"),
    "keras": Format("keras_file", ".keras", ("tensorflow",), "the model for keras.models.load_model; it takes prepared inputs"),
    "saved_model": Format("saved_model", "", ("tensorflow",), "a TensorFlow SavedModel; it takes rows as they are stored"),
}


@dataclass(frozen=True)
class Proof:
    """What comparing an export with the original came to.

    Attributes:
        rows: compared.
        largest_difference: between two outputs.
    """

    rows: int
    largest_difference: float


def export(trained: Trained, form: str, path: Path, x: np.ndarray) -> Proof:
    """Writes a model, loads it back, and compares it with the original.

    Args:
        trained: the model.
        form: a key of `FORMATS`.
        path: where to write; must not exist yet.
        x: rows (rows, *shape) to compare on.

    Raises:
        JobError: the model's framework does not write this format, or the format's library is not installed.
        StorageError: `path` exists, or cannot be written.
        TrainingError: the export predicts something else; nothing is left of it.
    """
    found = FORMATS[form]
    if trained.job.framework not in found.frameworks:
        there = ", ".join(name for name, other in FORMATS.items() if trained.job.framework in other.frameworks)
        raise JobError(f"--to {form}: found a model of framework: {trained.job.framework}; expected one of {there}")
    if path.exists():
        raise StorageError(f"{path} exists already; name another place with --out, or delete it")
    write, outputs = _functions(found.module)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as folder:
            unfinished = Path(folder) / (path.name if path.suffix == found.suffix else f"model{found.suffix}")
            write(trained, unfinished)
            proof = _compare(trained, x, outputs(trained, unfinished, x), form)
            shutil.move(unfinished, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}; name another place with --out") from error
    return proof


def _functions(
    module: str,
) -> tuple[Callable[[Trained, Path], None], Callable[[Trained, Path, np.ndarray], np.ndarray]]:
    loaded = importlib.import_module(f"raytrain_app.inference.exports.{module}")
    return loaded.write, loaded.outputs


def _compare(trained: Trained, x: np.ndarray, found: np.ndarray, form: str) -> Proof:
    expected = trained.outputs(x)
    if expected.shape != found.shape:
        raise TrainingError(
            f"the {form} export puts out {found.shape} where the model puts out {expected.shape}; please report this"
        )
    difference = float(np.abs(expected - found).max())
    if expected.ndim == 2:
        wrong = int((expected.argmax(axis=1) != found.argmax(axis=1)).sum())
        if wrong:
            raise TrainingError(
                f"the {form} export predicts another class on {wrong:,} of {len(x):,} rows (outputs differ by up to "
                f"{difference:.3g}), so it was not kept; another --to may serve"
            )
    elif not np.allclose(expected, found, rtol=1e-3, atol=1e-4):
        raise TrainingError(
            f"the {form} export's outputs differ by up to {difference:.3g}, so it was not kept; another --to may serve"
        )
    return Proof(len(x), difference)
