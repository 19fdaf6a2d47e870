"""Finding a source: names, paths, globs, URIs, formats, splits; and telling what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raytrain_app.data import known
from raytrain_app.data.parts import split_of
from raytrain_app.data.sources import locate_known
from raytrain_app.errors import DataError
from raytrain_app.task import Columns, Task
from tests.unit.data.making import Digits, assert_rows, images, labels, scan, write_idx

EXPECTED = {"train": (images(20, 0), labels(20)), "test": (images(10, 1), labels(10))}


class Mnist(Task):
    columns = Columns(shape=(28, 28), dtype="uint8", num_classes=10)


def test_the_embedded_sample_is_whole() -> None:
    result = scan("mnist-sample", Mnist())
    assert (result.problems, result.bad) == ([], [])
    assert {split: len(y) for split, (_, y) in result.rows.items()} == {"train": 8000, "test": 2000}
    assert all(set(y) == set(range(10)) for _, y in result.rows.values())


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-images-idx3-ubyte", "train"),
        ("t10k-labels.idx1-ubyte", "test"),
        ("data/train-00000-of-00001.parquet", "train"),
        ("mnist_test.csv", "test"),
        ("x_val", "validation"),
        ("Training/3", "train"),
        ("contest/latest.csv", None),
        ("train/test_001.csv", "train"),
    ],
)
def test_splits_are_told_by_words(name: str, split: str | None) -> None:
    assert split_of(name) == split


def test_home_globs_file_uris_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "a")
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in ("~/a", f"{tmp_path}/a/*-ubyte", f"file://{tmp_path}/a", f"{tmp_path}/**/*ubyte"):
        assert_rows(scan(source), EXPECTED)
    names = ",".join(str(path) for path in sorted((tmp_path / "a").glob("train*")))
    assert_rows(scan(names), {"train": EXPECTED["train"]})


def test_hidden_and_foreign_files_are_passed_over(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (tmp_path / "LICENSE").write_text("MIT")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "train-images-idx3-ubyte").write_bytes(b"")
    assert_rows(scan(tmp_path), EXPECTED)


def test_nothing_there(tmp_path: Path) -> None:
    text = scan(tmp_path / "nowhere").problem
    assert text == (
        f"data.source: there is nothing at {tmp_path}/nowhere (looked in {tmp_path}); expected a file, a folder, a glob or a "
        "URI, or one of mnist-sample, mnist, fashion-mnist"
    )
    assert scan("fashion_mnst").problem.endswith("; did you mean fashion-mnist?")
    assert "there is nothing at" in scan(tmp_path).problem


def test_a_format_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"\x89HDF\r\n\x1a\n")
    assert scan(path).problem == (
        f"data.source: {path}: it is not of a format that can be read (images, parquet, npz, idx, csv); found the first bytes "
        "89 48 44 46 0d 0a 1a 0a in a.bin"
    )


def test_several_formats_together_need_a_choice(tmp_path: Path) -> None:
    write_idx(tmp_path)
    np.savez(tmp_path / "mnist.npz", x=images(20), y=labels(20))
    assert scan(tmp_path).problem == (
        f"data.source: {tmp_path} has files of several formats: idx (4), npz (1); set data.format to one of them, or name files"
    )
    assert_rows(scan(tmp_path, format="idx"), EXPECTED)


def test_only_test_rows(tmp_path: Path) -> None:
    write_idx(tmp_path)
    source = f"{tmp_path}/t10k*"
    # A single pair of files is what the user means to train on; one of several splits is not.
    assert set(scan(source).rows) == {"train"}
    for name in ("a", "b"):
        np.savez(tmp_path / f"test_{name}.npz", x=images(20), y=labels(20))
    assert scan(f"{tmp_path}/*.npz").problem == f"data.source: {tmp_path}/*.npz has no rows for training, only for test"


def test_test_rows_from_another_source(tmp_path: Path) -> None:
    write_idx(tmp_path / "a", test_rows=0)
    np.savez(tmp_path / "b.npz", x=images(10, 1), y=labels(10))
    assert_rows(scan(tmp_path / "a", test_source=str(tmp_path / "b.npz")), EXPECTED)
    write_idx(tmp_path / "c")
    assert_rows(scan(tmp_path / "a", test_source=str(tmp_path / "c")), EXPECTED)
    assert "there is nothing at" in scan(tmp_path / "a", test_source="nowhere").problem


@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "data/MNIST/raw"), ("fashion-mnist", "home/.keras/datasets/fashion-mnist")]
)
@pytest.mark.parametrize("gz", ["", ".gz"])
def test_folders_of_other_tools_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str, gz: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("raytrain_app.data.sources.cache_folder", lambda: tmp_path / "cache")
    for file in known.KNOWN[name].files:
        path = tmp_path / folder / (file.name if gz else file.name.removesuffix(".gz"))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            out.truncate(file.size if gz else known.RAW_SIZES[file.name.removesuffix(".gz")])
    found, note = locate_known(name, offline=True)
    assert found is not None
    assert Path(found).resolve() == tmp_path / folder
    assert note == f"{known.KNOWN[name].title} is read from {found}"


def test_offline_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("raytrain_app.data.sources.cache_folder", lambda: tmp_path / "cache")
    with pytest.raises(DataError) as error:
        locate_known("mnist", offline=True)
    assert str(error.value) == (
        f"data.source: MNIST is not on this machine (looked in {tmp_path}/cache/mnist, ./data/MNIST/raw, ./MNIST/raw, "
        "~/data/MNIST/raw, ~/.keras/datasets/mnist.npz), and data.offline: true forbids to download it; run `raytrain data fetch "
        "mnist` where there is a network"
    )


def test_a_well_known_name_must_be_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_app.data.sources.locate_known", lambda *_: (str(write_idx(tmp_path, size=28)), ""))
    text = scan("mnist", Mnist()).problems[0]
    assert "train-images-idx3-ubyte is meant to be MNIST's but has other content: unpacked, found sha256" in text
    assert scan("mnist", Mnist(), allow_modified=True).problems == []


def test_transpose_needs_square_images() -> None:
    class Wide(Digits):
        columns = Columns(shape=(2, 8), dtype="uint8", num_classes=10)

    with pytest.raises(DataError, match=r"data.transpose: found rows of shape \(2, 8\); expected square images"):
        scan("mnist-sample", Wide(), transpose=True)
