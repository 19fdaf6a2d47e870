"""saved_model: a folder for TensorFlow Serving and others; its endpoint `serve` takes rows as they are stored."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import tensorflow as tf

from raytrain_app.inference.trained import BATCH_ROWS, Trained
from raytrain_app.learners.tensorflow_process import import_keras

if TYPE_CHECKING:
    from raytrain_app.learners.keras import KerasLearner


def write(trained: Trained, path: Path) -> None:
    columns, model = trained.task.columns, cast("KerasLearner", trained.learner).model

    def serve(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(model(trained.task.keras_inputs(x), training=False), tf.float32)

    archive = import_keras().export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", serve, input_signature=[tf.TensorSpec((None, *columns.shape), columns.dtype, name="x")])
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the endpoints
        archive.write_out(str(path), verbose=False)


def outputs(trained: Trained, path: Path, x: np.ndarray) -> np.ndarray:
    loaded = tf.saved_model.load(str(path))
    return np.concatenate([np.asarray(loaded.serve(tf.constant(x[i : i + BATCH_ROWS]))) for i in range(0, len(x), BATCH_ROWS)])
