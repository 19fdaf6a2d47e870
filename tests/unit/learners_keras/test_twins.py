"""The built-in tasks' models in both frameworks: the same architecture, inputs and, with equal weights, outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raytrain_app.task import load_task
from tests.unit.learners_keras.given import keras, tf

MODELS = [
    ("mnist", "linear", {}),
    ("mnist", "mlp", {"hidden": 9, "dropout": 0.1}),
    ("mnist", "cnn", {"channels": 3, "hidden": 8}),
    ("mnist", "cnn", {"channels": 3, "hidden": 8, "batch_norm": True}),
    ("synthetic", "linear", {}),
    ("synthetic", "mlp", {"hidden": 9, "batch_norm": True}),
]


@pytest.mark.parametrize(("name", "model", "options"), MODELS)
def test_equal_weights_give_equal_outputs(name: str, model: str, options: dict[str, Any]) -> None:
    task = load_task(name)
    chosen = task.models[model](**options)
    ours, theirs = task.torch_model(model, chosen).eval(), task.keras_model(keras, model, chosen)
    state = ours.state_dict()
    arrays = [value.numpy() for key, value in state.items() if not key.endswith("num_batches_tracked")]
    shapes = [v.shape for v in theirs.weights]
    assert len(arrays) == len(shapes)
    assert sum(map(np.size, arrays)) == sum(int(np.prod(shape)) for shape in shapes)
    theirs.set_weights([_as_keras(array, tuple(shape)) for array, shape in zip(arrays, shapes, strict=True)])
    x = np.random.default_rng(0).integers(0, 256, (6, *task.columns.shape)).astype(task.columns.dtype)
    x_torch, x_keras = task.torch_inputs(torch.from_numpy(x)), task.keras_inputs(tf.constant(x))
    np.testing.assert_array_equal(x_torch.numpy().ravel(), np.asarray(x_keras).ravel())
    with torch.no_grad():
        expected = ours(x_torch).numpy()
    np.testing.assert_allclose(np.asarray(theirs(x_keras)), expected, rtol=1e-4, atol=1e-5)


def _as_keras(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Keras has channels last, in kernels and in what a flattened image is made of."""
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    if array.ndim == 2 and array.shape[1] % 49 == 0 and array.shape[1] != 784:
        return array.reshape(array.shape[0], -1, 7, 7).transpose(2, 3, 1, 0).reshape(shape)
    return array.T if array.ndim == 2 else array
