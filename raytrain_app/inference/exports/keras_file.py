"""keras: the model in Keras's own format. It takes what the task's `keras_inputs` returns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

from raytrain_app.inference.trained import BATCH_ROWS, Trained
from raytrain_app.learners.tensorflow_process import import_keras


def write(trained: Trained, path: Path) -> None:
    path.write_bytes(trained.learner.export())


def outputs(trained: Trained, path: Path, x: np.ndarray) -> np.ndarray:
    model = import_keras().models.load_model(path, compile=False)
    parts = [
        model(trained.task.keras_inputs(tf.constant(x[i : i + BATCH_ROWS])), training=False) for i in range(0, len(x), BATCH_ROWS)
    ]
    return np.concatenate([np.asarray(tf.cast(part, tf.float32)) for part in parts])
