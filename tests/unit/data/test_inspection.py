"""Looking into a source and converting it, through the command line too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raytrain_app.cli.data import app
from raytrain_app.data.convert import convert
from raytrain_app.data.inspection import inspect_data
from raytrain_app.errors import DataError, JobError
from raytrain_app.job import Data
from tests.unit.data.making import Digits, assert_rows, idx_bytes, images, labels, scan, write, write_idx

TASK = "tests.unit.data.making:DIGITS"


def test_inspection_counts_everything(tmp_path: Path) -> None:
    write_idx(tmp_path, rows=30, test_rows=10)
    found = inspect_data(Data(source=str(tmp_path)), Digits())
    assert (found.format, found.problems) == ("idx", [])
    train = found.splits["train"]
    assert (train.rows, train.bad, train.labels.tolist(), len(train.samples)) == (30, 0, [3] * 10, 10)
    x = images(30)
    assert (train.low, train.high) == (x.min(), x.max())


def test_rows_that_two_splits_share_are_a_problem(tmp_path: Path) -> None:
    x, y = images(30), labels(30)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=np.concatenate([x[:4], images(6, 1)]), y_test=labels(10))
    found = inspect_data(Data(source=str(tmp_path / "a.npz")), Digits())
    assert found.duplicates == {("train", "test"): 4}
    assert found.problems == ["4 of the rows of test are in train too, so what is measured on test is too good"]


def test_all_kinds_of_problems_are_listed(tmp_path: Path) -> None:
    y = labels(30)
    y[y == 3] = 77
    np.savez(tmp_path / "a.npz", x_train=images(30), y_train=y)
    found = inspect_data(Data(source=str(tmp_path / "a.npz")), Digits())
    assert found.splits["train"].bad == 3
    assert found.problems[0] == f"{tmp_path}/a.npz, x_train, row 3: label 77 is not in 0..9"
    assert found.problems[-1] == "train has no rows of class 3; set data.classes if there are fewer"


def test_convert_writes_what_reads_back(tmp_path: Path) -> None:
    write_idx(tmp_path / "a")
    out = tmp_path / "a.parquet"
    assert convert(Data(source=str(tmp_path / "a")), Digits(), out) == ({"train": 20, "test": 10}, 0)
    assert_rows(scan(out), {"train": (images(20), labels(20)), "test": (images(10, 1), labels(10))})
    assert pq.read_schema(out).names == ["image", "label", "split"]
    with pytest.raises(DataError, match=r"a\.parquet exists already; delete it, or write to another file"):
        convert(Data(source=str(tmp_path / "a")), Digits(), out)


def test_convert_applies_the_options_for_good(tmp_path: Path) -> None:
    write(tmp_path / "a" / "images-idx3-ubyte", idx_bytes(images(26)))
    write(tmp_path / "a" / "labels-idx1-ubyte", idx_bytes((1 + np.arange(26)).astype(np.uint8)))
    data = Data(source=str(tmp_path / "a"), classes=26, label_offset=1, transpose=True)
    convert(data, Digits(), tmp_path / "a.parquet")
    assert_rows(scan(tmp_path / "a.parquet", classes=26), {"train": (images(26).swapaxes(1, 2), np.arange(26))})


def test_convert_leaves_nothing_behind_where_it_fails(tmp_path: Path) -> None:
    y = labels(20)
    y[7] = 70
    np.savez(tmp_path / "a.npz", x=images(20), y=y)
    before = sorted(os.listdir(tmp_path))
    data = Data(source=str(tmp_path / "a.npz"))
    with pytest.raises(
        DataError, match=r"a\.npz, x, row 7: label 70 is not in 0\.\.9\nCorrect these rows, or leave them out with --drop"
    ):
        convert(data, Digits(), tmp_path / "out.parquet")
    with pytest.raises(DataError, match=r"the folder of .*/no/out\.parquet does not exist; make it first"):
        convert(Data(source=str(tmp_path / "a.npz"), on_bad_row="drop"), Digits(), tmp_path / "no" / "out.parquet")
    assert sorted(os.listdir(tmp_path)) == before
    dropping = Data(source=str(tmp_path / "a.npz"), on_bad_row="drop")
    assert convert(dropping, Digits(), tmp_path / "out.parquet") == ({"train": 19}, 1)


def test_inspect_prints_and_ends_with_2_where_something_is_wrong(tmp_path: Path) -> None:
    write_idx(tmp_path / "a")
    fine = CliRunner().invoke(app, ["inspect", str(tmp_path / "a"), "--task", TASK])
    assert fine.exit_code == 0
    assert "train  20 rows, values 0..255" in fine.output.replace("1..", "0..")
    assert "no problems" in fine.output
    (tmp_path / "a" / "train-labels-idx1-ubyte").write_bytes(b"")
    broken = CliRunner().invoke(app, ["inspect", str(tmp_path / "a"), "--task", TASK, "--json"])
    assert broken.exit_code == 2
    assert json.loads(broken.output)["problems"][0] == (
        f"{tmp_path}/a/train-labels-idx1-ubyte is empty (0 bytes); get it again; expected "
        "MNIST's 28,881 bytes with sha256 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c or Fashion-MNIST's "
        "29,515 bytes with sha256 a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
    )


def test_convert_on_the_command_line(tmp_path: Path) -> None:
    write_idx(tmp_path / "a")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "a"), str(tmp_path / "o.parquet"), "--task", TASK])
    assert (result.exit_code, result.output) == (0, f"{tmp_path}/o.parquet: 20 train, 10 test rows\n")
    wrong = CliRunner().invoke(app, ["convert", str(tmp_path / "a"), str(tmp_path / "o.csv"), "--task", TASK])
    assert isinstance(wrong.exception, DataError)


def test_fetch_knows_its_names() -> None:
    result = CliRunner().invoke(app, ["fetch", "cifar"])
    assert isinstance(result.exception, JobError)
    assert str(result.exception) == "data fetch: 'cifar' is not a data set that can be fetched; expected mnist or fashion-mnist"
