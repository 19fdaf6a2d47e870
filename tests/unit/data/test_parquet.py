"""Parquet: every form in which people store images, and every way in which files disagree or break."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raytrain_app.task import Columns, Task
from tests.unit.data.making import Floats, assert_rows, images, labels, scan

X, Y = images(20), labels(20)
ROWS = {"train": (X, Y)}


def save(path: Path, *, row_group_size: int = 7, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def png(image: np.ndarray, format_: str = "PNG", mode: str | None = None) -> bytes:
    stream = io.BytesIO()
    picture = Image.fromarray(image)
    (picture.convert(mode) if mode else picture).save(stream, format_)
    return stream.getvalue()


def encoded(rows: np.ndarray) -> list[dict[str, Any]]:
    return [{"bytes": png(row), "path": None} for row in rows]


FORMS: dict[str, pa.Array] = {
    "list": pa.array([row.ravel().tolist() for row in X], pa.list_(pa.uint8())),
    "large list": pa.array([row.ravel().tolist() for row in X], pa.large_list(pa.int64())),
    "fixed list": pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 16),
    "nested list": pa.array(X.tolist(), pa.list_(pa.list_(pa.int32()))),
    "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(X),
    "Hugging Face": pa.array(encoded(X), pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    "binary": pa.array([png(row) for row in X]),
}


@pytest.mark.parametrize("form", FORMS)
def test_reads_every_form_of_image_column(tmp_path: Path, form: str) -> None:
    assert_rows(scan(save(tmp_path / "a.parquet", image=FORMS[form], label=Y)), ROWS)


def test_reads_a_column_a_pixel(tmp_path: Path) -> None:
    columns: dict[str, Any] = {f"pixel{n}": X.reshape(20, 16)[:, n] for n in range(16)}
    assert_rows(scan(save(tmp_path / "a.parquet", label=Y, **columns)), ROWS)


def test_a_split_column_names_the_splits(tmp_path: Path) -> None:
    split = ["train", "test"] * 10
    path = save(tmp_path / "a.parquet", image=FORMS["fixed list"], label=Y, split=split)
    assert_rows(scan(path), {"train": (X[::2], Y[::2]), "test": (X[1::2], Y[1::2])})
    odd = save(tmp_path / "b.parquet", image=FORMS["fixed list"], label=Y, split=["train", "holdout"] * 10)
    assert scan(odd).problem == f"{odd}: column split has the value 'holdout'; expected train, validation, test"


def test_row_numbers_are_those_of_the_file_whatever_the_split_and_row_group(tmp_path: Path) -> None:
    y = Y.astype(np.int64)
    y[17] = 10
    path = save(tmp_path / "a.parquet", image=FORMS["fixed list"], label=y, split=["train", "test"] * 10)
    assert scan(path, window_mib=1, order="windowed").bad == [f"{path}, row 17: label 10 is not in 0..9"]


def test_reads_hugging_face_folders(tmp_path: Path) -> None:
    for part in range(2):
        rows = slice(part * 10, part * 10 + 10)
        name = f"train-0000{part}-of-00002.parquet"
        save(tmp_path / "mnist" / name, image=FORMS["Hugging Face"].slice(rows.start, 10), label=Y[rows])
    save(tmp_path / "mnist" / "test-00000-of-00001.parquet", image=FORMS["Hugging Face"].slice(0, 5), label=Y[:5])
    (tmp_path / "README.md").write_text("# MNIST")
    assert_rows(scan(tmp_path), {"train": (X, Y), "test": (X[:5], Y[:5])})
    assert_rows(scan(f"{tmp_path}/mnist/train-*.parquet"), ROWS)


def test_a_file_without_the_label_column_is_named(tmp_path: Path) -> None:
    save(tmp_path / "a.parquet", image=FORMS["list"], label=Y.astype(np.int64))
    odd = save(tmp_path / "b.parquet", image=FORMS["list"], goal=Y.astype(np.int64))
    assert scan(tmp_path).problem == (
        f"{odd} has no label column: found columns image, goal; expected one named y or label or labels or target; rename it, or "
        "override the task's prepare"
    )


def test_a_renamed_column_in_one_file_of_many_is_named(tmp_path: Path) -> None:
    save(tmp_path / "a.parquet", image=FORMS["list"], label=Y)
    odd = save(tmp_path / "b.parquet", image=FORMS["list"], target=Y)
    assert (
        scan(tmp_path).problem
        == f"{odd} has no column label: found image, target; expected label, as in {tmp_path}/a.parquet; rename it"
    )


def test_types_that_differ_between_files_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.parquet", image=FORMS["list"], label=Y.astype(np.int8))
    odd = save(tmp_path / "b.parquet", image=FORMS["list"], label=Y.astype(np.int64))
    assert scan(tmp_path).problem == (
        f"{odd}: column label has the type int64; expected int8, as in {tmp_path}/a.parquet; write all files with the same types"
    )


def test_rows_that_cannot_be_images_are_named(tmp_path: Path) -> None:
    struct = encoded(X)
    struct[2]["bytes"] = png(images(1, size=5)[0])
    struct[5]["bytes"] = png(X[5], mode="RGB")
    struct[8]["bytes"] = struct[8]["bytes"][:40]
    struct[11]["bytes"] = None
    struct[13]["bytes"] = b"<html>"
    struct[16]["bytes"] = png(X[16], "JPEG")
    path = save(tmp_path / "a.parquet", image=pa.array(struct), label=Y)
    result = scan(path)
    bad = dict(text.removeprefix(f"{path}, row ").split(": ", 1) for text in result.bad)
    assert bad["2"] == "found an image of 5 x 5; expected 4 x 4"
    assert bad["5"] == "found an image of mode RGB; expected L or 1; convert it, or override the task's prepare"
    assert bad["8"].startswith("it cannot be decoded as an image (")
    assert bad["11"] == "there is no value for x"
    assert bad["13"].startswith("it cannot be decoded as an image (cannot identify image file")
    assert set(bad) == {"2", "5", "8", "11", "13"}
    assert len(result.rows["train"][1]) == 15


def test_lists_of_other_lengths_and_missing_values_are_named(tmp_path: Path) -> None:
    rows: list[Any] = [row.ravel().tolist() for row in X]
    rows[3], rows[6], rows[9] = rows[3][:-1], None, [None, *rows[9][1:]]
    y: list[Any] = Y.tolist()
    y[12] = None
    path = save(tmp_path / "a.parquet", row_group_size=100, image=pa.array(rows, pa.list_(pa.uint8())), label=pa.array(y))
    result = scan(path)
    assert result.bad == [
        f"{path}, row 3: found x of 15; expected 4 x 4",
        f"{path}, row 6: there is no value for x",
        f"{path}, row 9: x is list '{str(rows[9])[:40]}'; expected numbers or an encoded image",
        f"{path}, row 12: label nan is not a whole number",
    ]


def test_nan_in_a_float_column_names_the_row(tmp_path: Path) -> None:
    x = X.reshape(20, 16).astype(np.float32)
    x[4, 3] = np.nan
    path = save(tmp_path / "a.parquet", image=pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 16), label=Y)
    assert scan(path, Floats()).bad == [f"{path}, row 4: value 3 of x is nan; expected a finite number"]


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_cut_files_are_refused(tmp_path: Path, keep: int) -> None:
    path = save(tmp_path / "a.parquet", image=FORMS["list"], label=Y)
    path.write_bytes(path.read_bytes()[:keep])
    text = f"{path} is empty (0 bytes)" if keep == 0 else f"{path} is cut off or no Parquet file: its last bytes are "
    assert text in scan(path).problem


def test_a_damaged_page_is_refused(tmp_path: Path) -> None:
    table = pa.table({"image": FORMS["fixed list"], "label": Y})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[data.index(X.astype("<i4").tobytes()[:64]) + 3] ^= 255
    path.write_bytes(bytes(data))
    assert scan(path).problem.startswith(f"{path} cannot be read: ")


class Colours(Task):
    columns = Columns(shape=(3,), dtype="float32", num_classes=2)

    def prepare(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return {"x": np.stack([batch["r"], batch["g"], batch["b"]], axis=1), "y": batch["dark"]}


def test_a_task_prepares_its_own_columns(tmp_path: Path) -> None:
    path = save(tmp_path / "a.parquet", r=[0.1, 0.9], g=[0.2, 0.8], b=[0.3, 0.7], dark=[True, False])
    assert_rows(scan(path, Colours()), {"train": (np.array([[0.1, 0.2, 0.3], [0.9, 0.8, 0.7]], np.float32), np.array([1, 0]))})
