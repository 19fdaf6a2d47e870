"""onnx: a model for ONNX Runtime and others, with input `x`, rows as they are stored, and output `outputs`."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path

import numpy as np
import torch

from raytrain_app.errors import JobError
from raytrain_app.inference.exports.torch_program import program, sample
from raytrain_app.inference.trained import BATCH_ROWS, Trained

try:
    import onnxruntime
    import onnxscript  # noqa: F401 - torch.onnx needs it, and says so in a long traceback
except ImportError as error:
    raise JobError(f"--to onnx needs the package {error.name}; install raytrain-app[onnx]") from None


def write(trained: Trained, path: Path) -> None:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # the exporter talks of itself
        warnings.simplefilter("ignore")
        torch.onnx.export(
            program(trained),
            (sample(trained),),
            path,
            input_names=["x"],
            output_names=["outputs"],
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def outputs(trained: Trained, path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    parts = [session.run(["outputs"], {"x": x[i : i + BATCH_ROWS]})[0] for i in range(0, len(x), BATCH_ROWS)]
    return np.concatenate(parts)
