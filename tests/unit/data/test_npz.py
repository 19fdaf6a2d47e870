"""NumPy archives: the keys that people use, and every way in which they break."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data.making import Floats, assert_rows, images, labels, scan

X, Y, TEST_X, TEST_Y = images(20), labels(20), images(10, 1), labels(10)
EXPECTED = {"train": (X, Y), "test": (TEST_X, TEST_Y)}


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    "keys", [("x_train", "y_train", "x_test", "y_test"), ("train_images", "train_labels", "test_images", "test_labels")]
)
@pytest.mark.parametrize("how", [np.savez, np.savez_compressed])
def test_reads_keras_and_medmnist_keys(tmp_path: Path, keys: tuple[str, ...], how: Any) -> None:
    how(tmp_path / "a.npz", **dict(zip(keys, (X, Y[:, None], TEST_X, TEST_Y), strict=True)))
    assert_rows(scan(tmp_path / "a.npz"), EXPECTED)


def test_reads_x_and_y_as_training_rows_and_a_validation_split(tmp_path: Path) -> None:
    assert_rows(scan(save(tmp_path / "a.npz", x=X, y=Y)), {"train": (X, Y)})
    with_validation = save(tmp_path / "b.npz", train_images=X, train_labels=Y, val_images=TEST_X, val_labels=TEST_Y)
    assert_rows(scan(with_validation), {"train": (X, Y), "validation": (TEST_X, TEST_Y)})


def test_reads_one_file_a_split(tmp_path: Path) -> None:
    save(tmp_path / "train.npz", x=X, y=Y)
    save(tmp_path / "test.npz", x=TEST_X, y=TEST_Y)
    assert_rows(scan(tmp_path), EXPECTED)


def test_flat_rows_and_channel_axis_fit(tmp_path: Path) -> None:
    assert_rows(scan(save(tmp_path / "a.npz", x=X.reshape(20, 16), y=Y)), {"train": (X, Y)})
    assert_rows(scan(save(tmp_path / "b.npz", x=X[..., None], y=Y)), {"train": (X, Y)})


def test_whole_floats_become_uint8_and_fractions_are_explained(tmp_path: Path) -> None:
    assert_rows(scan(save(tmp_path / "a.npz", x=X.astype(np.float64), y=Y)), {"train": (X, Y)})
    scaled = save(tmp_path / "b.npz", x=X / 255, y=Y)
    assert scan(scaled).problem == (
        f"{scaled}, x: the values of x are fractions between 0 and 1; the task expects whole numbers 0..255; multiply them by "
        "255 in the task's prepare, or give its columns a float dtype"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_name_row_and_value(tmp_path: Path, value: float) -> None:
    x = X.astype(np.float32)
    x[7, 2, 1] = value
    path = save(tmp_path / "a.npz", x=x, y=Y)
    assert scan(path, Floats()).bad == [f"{path}, x, row 7: value 9 of x is {value}; expected a finite number"]


def test_values_out_of_range_name_row_and_value(tmp_path: Path) -> None:
    x = X.astype(np.int16)
    x[3, 0, 0], x[5, 3, 3] = 256, -1
    path = save(tmp_path / "a.npz", x=x, y=Y)
    assert scan(path).bad == [
        f"{path}, x, row 3: value 0 of x is 256; expected a whole number in 0..255",
        f"{path}, x, row 5: value 15 of x is -1; expected a whole number in 0..255",
    ]


def test_labels_that_are_wrong_name_row_and_label(tmp_path: Path) -> None:
    y = Y.astype(np.float64)
    y[[1, 4, 6, 9, 11]] = -1, 10, 255, 3.5, np.nan
    path = save(tmp_path / "a.npz", x=X, y=y)
    result = scan(path)
    assert result.bad == [
        f"{path}, x, row 1: label -1 is not in 0..9",
        f"{path}, x, row 4: label 10 is not in 0..9",
        f"{path}, x, row 6: label 255 is not in 0..9",
        f"{path}, x, row 9: label 3.5 is not a whole number",
        f"{path}, x, row 11: label nan is not a whole number",
    ]
    assert len(result.rows["train"][1]) == 15


def test_one_hot_labels(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", x=X, y=np.eye(10)[Y])
    assert (
        "the label has 10 values a row; expected one class number; if it is one-hot, set data.one_hot: true" in scan(path).problem
    )
    assert_rows(scan(path, one_hot=True), {"train": (X, Y)})


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": X, "y": Y[:19]}, "{path}: x has 20 rows, but y has 19; expected as many in both"),
        ({"x": images(20, size=5), "y": Y}, "{path}: x has rows of 5 x 5; the task expects 4 x 4"),
        ({"x": X}, "{path} has the arrays x; expected x_train and y_train (x_test, y_test), or train_images and train_labels"),
        ({"a": X, "b": Y}, "{path} has the arrays a, b; expected x_train and y_train"),
        ({"x": X, "y": np.array(list("abcdefghijklmnopqrst"))}, "label 'a' is no number"),
        ({"x": np.array([None] * 20), "y": Y}, "{path}: x has Python objects (dtype object), which are never loaded"),
        ({"x": X.astype("S1"), "y": Y}, "{path}, x: x has the type |S1; expected numbers that fit uint8"),
        ({"x": np.asfortranarray(X), "y": Y}, "{path}: array x is damaged: it is in Fortran order"),
        ({"x_test": X, "y_test": Y}, "{path} has the arrays x_test, y_test; expected x_train and y_train"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, Any], text: str) -> None:
    path = save(tmp_path / "a.npz", **arrays)
    result = scan(path)
    assert text.format(path=path) in "\n".join(result.problems + result.bad)


@pytest.mark.parametrize("size", [0, 10, 500])
def test_cut_archives_are_refused(tmp_path: Path, size: int) -> None:
    path = save(tmp_path / "a.npz", x=X, y=Y)
    path.write_bytes(path.read_bytes()[:size])
    text = f"{path} is empty (0 bytes)" if size == 0 else f"{path} is cut off, damaged, or no .npz file (File is not a zip file)"
    assert text in scan(path).problem


def test_an_array_shorter_than_its_header_says_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.save(stream, X)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", stream.getvalue()[:-16])
        archive.writestr("y.npy", stream.getvalue())
    text = f"{tmp_path}/a.npz: array x is damaged: its header says 20 x 4 x 4 of uint8, 320 bytes; found 304; get the file again"
    assert scan(tmp_path / "a.npz").problem == text


def test_a_flipped_byte_is_found_by_the_archive_checksum(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", x=X, y=Y)
    data = bytearray(path.read_bytes())
    data[data.index(X.tobytes()) + 5] ^= 255
    path.write_bytes(bytes(data))
    assert scan(path).problem == f"{path}: array x is damaged: Bad CRC-32 for file 'x.npy'; get the file again"


def test_a_modified_keras_mnist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "mnist.npz", x_train=X, y_train=Y)
    monkeypatch.setattr("raytrain_app.data.formats.npz.KERAS_NPZ", ("mnist.npz", path.stat().st_size, "0" * 64))
    text = scan(path).problem
    assert f"{path} has the name and the size of Keras's MNIST file but other content: found sha256 " in text
    assert "set data.allow_modified: true" in text
    assert_rows(scan(path, allow_modified=True), {"train": (X, Y)})
