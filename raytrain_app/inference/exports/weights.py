"""safetensors: parameters and buffers by the names that the framework gives them, and where they came from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from raytrain_app.inference.trained import Trained
from raytrain_app.state import TrainState


def write(trained: Trained, path: Path) -> None:
    """Writes the arrays, with the model's name, options and hash in the file's metadata."""
    arrays = {name: np.asarray(array, order="C") for name, array in {**trained.state.weights, **trained.state.buffers}.items()}
    metadata = {
        "run": trained.job.name,
        "task": trained.job.task,
        "framework": trained.job.framework,
        "model": json.dumps({"name": trained.job.model.name, **trained.job.model.options}),
        "checkpoint": trained.checkpoint,
        "weights_sha256": trained.sha256,
    }
    save_file(arrays, path, metadata)


def outputs(trained: Trained, path: Path, x: np.ndarray) -> np.ndarray:
    """Loads the arrays into the model and computes with it; the model has its own again afterwards."""
    with safe_open(path, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    weights = {name: arrays[name] for name in trained.state.weights}
    buffers = {name: arrays[name] for name in trained.state.buffers}
    # Zeros in between, so that what is computed is what was read.
    nothing = {name: np.zeros_like(array) for name, array in trained.state.weights.items()}
    trained.learner.load(TrainState(nothing, trained.state.buffers))
    trained.learner.load(TrainState(weights, buffers))
    found = trained.outputs(x)
    trained.learner.load(TrainState(trained.state.weights, trained.state.buffers))
    return found
