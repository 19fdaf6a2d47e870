"""A Keras run is looked at and used like a PyTorch run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raytrain_app import runner
from raytrain_app.data.one_split import read_split
from raytrain_app.errors import JobError
from raytrain_app.inference.evaluations import evaluate_run
from raytrain_app.inference.exports import export
from raytrain_app.inference.prediction import find_pictures, predict
from raytrain_app.inference.preview import write_preview
from raytrain_app.inference.trained import Trained, load_trained
from raytrain_app.job import job_from_dict
from raytrain_app.storage.folder import Folder
from tests.integration.report.conftest import Run

pytestmark = pytest.mark.slow

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; pip install 'raytrain-app[tensorflow]'", allow_module_level=True)


@pytest.fixture(scope="module")
def run(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    job = job_from_dict(
        {
            "name": "digits-keras",
            "task": "mnist",
            "framework": "tensorflow",
            "model": {"name": "cnn", "channels": 4, "hidden": 16, "batch_norm": True},
            "train": {"epochs": 1, "global_batch_size": 100, "virtual_shards": 2},
            "optimizer": {"name": "adam", "lr": 0.01},
            "scaling": {"workers": 1},
            "storage": str(tmp_path_factory.mktemp("runs")),
        }
    )
    done = runner.run(job)
    return Run(job, Folder.open(done.directory), done.record)


@pytest.fixture(scope="module")
def trained(run: Run) -> Trained:
    return load_trained(run.folder)


def test_evaluation_is_that_of_training_and_predictions_agree_with_it(run: Run, trained: Trained, tmp_path: Path) -> None:
    found = evaluate_run(trained, run.folder, "test")
    assert (found["loss"], found["accuracy"]) == (run.result["test_loss"], run.result["test_accuracy"])
    assert found["weights_sha256"] == run.result["weights_sha256"]
    x, y = read_split(run.job, trained.task, "test")
    for number, row in enumerate(x[:100]):
        Image.fromarray(row).save(tmp_path / f"{number:03d}.png")
    right = sum(p.prediction == label for p, label in zip(predict(trained, find_pictures([str(tmp_path)])), y, strict=False))
    assert right == int((trained.outputs(x[:100]).argmax(axis=1) == y[:100]).sum()) > 50


def test_tensorboard_shows_rows_and_graph(run: Run, trained: Trained) -> None:
    assert write_preview(trained, run.folder) == ""
    board = EventAccumulator(str(run.folder.local_path / "tensorboard" if run.folder.local_path else ""))
    board.Reload()
    assert board.Scalars("epoch/val_loss")[-1].value == pytest.approx(run.result["val_loss"], rel=1e-6)
    assert len(board.Scalars("step/workers")) == run.result["steps"]
    assert board.Tags()["images"] == ["training rows"]
    layers = {part for node in board.Graph().node for part in node.name.split("/")}
    assert {"x", "convolution", "MatMul"} <= layers


READERS = {
    "keras": "import keras; found = keras.models.load_model(path)(x.astype('float32') / 255)",
    "saved_model": "import tensorflow as tf; model = tf.saved_model.load(path); found = model.serve(tf.constant(x))",
    "safetensors": (
        "import keras; from safetensors.numpy import load_file; from raytrain_app.tasks.mnist import TASK, Cnn\n"
        "model = TASK.keras_model(keras, 'cnn', Cnn(channels=4, hidden=16, batch_norm=True)); arrays = load_file(path)\n"
        "model.set_weights([arrays[v.path.removeprefix(model.name + '/').replace('/', '.')] for v in model.weights])\n"
        "found = model(TASK.keras_inputs(x))"
    ),
}


@pytest.mark.parametrize("form", READERS)
def test_an_export_predicts_the_same_on_all_test_rows_elsewhere(form: str, run: Run, trained: Trained, tmp_path: Path) -> None:
    suffix = {"keras": ".keras"}.get(form, "")
    path, (x, _) = tmp_path / f"model{suffix}", read_split(run.job, trained.task, "test")
    proof = export(trained, form, path, x)
    assert proof.rows == 2000
    assert proof.largest_difference < 1e-4
    np.save(tmp_path / "x.npy", x)
    script = (
        f"import sys, numpy as np; path, x = {str(path)!r}, np.load({str(tmp_path / 'x.npy')!r})\n"
        f"{READERS[form]}\n"
        f"np.save({str(tmp_path / 'found.npy')!r}, np.asarray(found))\n"
        f"sys.exit('raytrain is needed' if {form != 'safetensors'} and 'raytrain_app' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
    found = np.load(tmp_path / "found.npy")
    assert np.array_equal(found.argmax(axis=1), trained.outputs(x).argmax(axis=1))


def test_what_only_pytorch_can_write(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="found a model of framework: tensorflow; expected one of safetensors, keras, saved_model"):
        export(trained, "onnx", tmp_path / "model.onnx", np.zeros((1, 28, 28), np.uint8))
