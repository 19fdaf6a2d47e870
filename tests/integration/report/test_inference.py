"""A trained model is evaluated, predicts and is taken away, and always says the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raytrain_app.data.one_split import read_split
from raytrain_app.errors import DataError, JobError, StorageError, TrainingError
from raytrain_app.inference.evaluations import evaluate_run
from raytrain_app.inference.exports import _compare, export
from raytrain_app.inference.prediction import find_pictures, predict, predict_on_cluster
from raytrain_app.inference.trained import Trained, load_trained
from raytrain_app.report.evaluations import read_evaluation
from tests.integration.report.conftest import Run

HELD_OUT = 100


@pytest.fixture(scope="module")
def trained(run: Run) -> Trained:
    return load_trained(run.folder)


@pytest.fixture(scope="module")
def test_rows(trained: Trained) -> tuple[np.ndarray, np.ndarray]:
    return read_split(trained.job, trained.task, "test")


# ---- evaluate ----


@pytest.mark.parametrize("workers", [None, 1, 3])
def test_evaluation_is_that_of_training_bit_for_bit(run: Run, trained: Trained, workers: int | None) -> None:
    found = evaluate_run(trained, run.folder, "test", workers=workers)
    assert found["weights_sha256"] == run.result["weights_sha256"]
    assert (found["loss"], found["accuracy"]) == (run.result["test_loss"], run.result["test_accuracy"])
    assert found["rows"] == np.sum(found["confusion"]) == 2000
    assert found["correct"] == np.trace(found["confusion"])
    assert read_evaluation(run.folder) == found


def test_validation_rows_are_those_that_training_held_out(run: Run, trained: Trained) -> None:
    found = evaluate_run(trained, run.folder, "validation")
    assert (found["loss"], found["accuracy"]) == (run.result["val_loss"], run.result["val_accuracy"])
    everything = evaluate_run(trained, run.folder, "train")["rows"] + found["rows"]
    assert everything == 8000


def test_every_checkpoint_can_be_asked_for(run: Run) -> None:
    names = [load_trained(run.folder, which).checkpoint for which in ("latest", "144", "step-00000144")]
    assert names == ["step-00000144"] * 3
    best = run.result["checkpoint"]
    assert best.endswith(load_trained(run.folder, "best").checkpoint)
    with pytest.raises(StorageError, match="there is no checkpoint 'step-00000007'"):
        load_trained(run.folder, "7")


def test_rows_that_are_not_there(run: Run, trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is nothing at"):
        evaluate_run(trained, run.folder, "test", str(tmp_path / "nothing"))


# ---- predict ----


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, test_rows: tuple[np.ndarray, np.ndarray]) -> Path:
    """The first held-out digits as files."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, row in enumerate(test_rows[0][:HELD_OUT]):
        Image.fromarray(row).save(folder / f"{number:03d}.png")
    return folder


def test_predictions_of_held_out_digits_are_right_as_often_as_evaluation_says(
    run: Run, trained: Trained, pictures: Path, test_rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    x, y = (part[:HELD_OUT] for part in test_rows)
    table = pa.table({"image": x.reshape(HELD_OUT, -1).tolist(), "label": y})
    pq.write_table(table, tmp_path / "rows.parquet")
    evaluated = evaluate_run(trained, run.folder, "test", str(tmp_path / "rows.parquet"))
    predicted = list(predict(trained, find_pictures([str(pictures)])))
    assert evaluated["rows"] == len(predicted) == HELD_OUT
    assert [prediction.done for prediction in predicted] == [[]] * HELD_OUT
    assert sum(p.prediction == label for p, label in zip(predicted, y, strict=True)) == evaluated["correct"] > 80


def test_the_cluster_predicts_the_same_in_the_same_order(run: Run, trained: Trained, pictures: Path) -> None:
    (pictures / "050.png").write_bytes(b"damaged")
    files = find_pictures([str(pictures / "*.png")])
    here = list(predict(trained, files))
    assert list(predict_on_cluster(trained, run.folder.uri, files, workers=2)) == here
    assert [p.error is not None for p in here].index(True) == 50
    assert "050.png cannot be read as a picture" in str(here[50].error)


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="none ends with"):
        find_pictures([str(tmp_path)])
    with pytest.raises(DataError, match=r"^there is nothing at"):
        find_pictures([str(tmp_path / "missing.png")])


# ---- export ----

READERS = {
    "torch": "program = torch.export.load(path).module(); found = program(torch.from_numpy(x)).detach().numpy()",
    "onnx": "import onnxruntime; found = onnxruntime.InferenceSession(path).run(None, {'x': x})[0]",
    "safetensors": (
        "from safetensors.torch import load_file; from raytrain_app.tasks.mnist import TASK, Cnn\n"
        "model = TASK.torch_model('cnn', Cnn(channels=4, hidden=16, batch_norm=True)); model.load_state_dict(load_file(path))\n"
        "found = model.eval()(TASK.torch_inputs(torch.from_numpy(x))).detach().numpy()"
    ),
}


@pytest.mark.parametrize("form", READERS)
def test_an_export_predicts_the_same_on_all_test_rows_elsewhere(
    form: str, trained: Trained, test_rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    path, x = tmp_path / "model", test_rows[0]
    proof = export(trained, form, path, x)
    assert proof.rows == 2000
    assert proof.largest_difference < 1e-4
    np.save(tmp_path / "x.npy", x)
    script = (
        f"import sys, numpy as np, torch; path, x = {str(path)!r}, np.load({str(tmp_path / 'x.npy')!r})\n"
        f"{READERS[form]}\n"
        f"np.save({str(tmp_path / 'found.npy')!r}, found)\n"
        f"sys.exit('raytrain is needed' if {form != 'safetensors'} and 'raytrain_app' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    found = np.load(tmp_path / "found.npy")
    assert np.array_equal(found.argmax(axis=1), trained.outputs(x).argmax(axis=1))
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_an_export_that_predicts_something_else_is_not_kept(trained: Trained, test_rows: tuple[np.ndarray, np.ndarray]) -> None:
    x = test_rows[0][:50]
    outputs = trained.outputs(x)
    assert _compare(trained, x, outputs, "torch").largest_difference == 0
    outputs[7] = np.roll(outputs[7], 1)
    with pytest.raises(TrainingError, match="another class on 1 of 50 rows"):
        _compare(trained, x, outputs, "torch")


def test_exports_that_cannot_be(trained: Trained, test_rows: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    with pytest.raises(JobError, match="found a model of framework: torch; expected one of safetensors, torch, onnx"):
        export(trained, "keras", tmp_path / "model.keras", test_rows[0])
    (tmp_path / "taken").write_text("precious")
    with pytest.raises(StorageError, match="exists already"):
        export(trained, "safetensors", tmp_path / "taken", test_rows[0])
    assert (tmp_path / "taken").read_text() == "precious"
