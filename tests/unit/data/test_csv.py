"""CSV: Kaggle's dialects, a task's own columns, and every way in which lines break."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from pyarrow import csv as pa_csv

from raytrain_app.data.formats import csv
from raytrain_app.data.load import plan_data, wanted
from raytrain_app.job import Data
from raytrain_app.task import Columns, Task
from tests.unit.data.making import Digits, Floats, assert_rows, images, labels, scan

X, Y = images(20), labels(20)
_OPEN = pa_csv.open_csv
HEADER = "label," + ",".join(f"pixel{n}" for n in range(16))
LINES = [",".join(map(str, [y, *x.ravel()])) for x, y in zip(X.tolist() and X, Y, strict=True)]


def save(path: Path, lines: Sequence[str], end: str = "\n") -> Path:
    text = "".join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("header", [[HEADER], []], ids=["header", "no header"])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_reads_785_columns(tmp_path: Path, header: list[str], name: str, end: str) -> None:
    assert_rows(scan(save(tmp_path / name, header + LINES, end)), {"train": (X, Y)})


def test_reads_semicolons_a_byte_order_mark_quotes_and_no_last_line_end(tmp_path: Path) -> None:
    lines = ['"' + line.replace(",", '";"') + '"' for line in LINES]
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    assert_rows(scan(path), {"train": (X, Y)})


def test_finds_the_label_by_its_name(tmp_path: Path) -> None:
    header = ",".join([*HEADER.split(",")[1:], "class"])
    lines = [",".join([*line.split(",")[1:], line.split(",")[0]]) for line in LINES]
    assert_rows(scan(save(tmp_path / "a.csv", [header, *lines])), {"train": (X, Y)})


def test_reads_train_and_test_files(tmp_path: Path) -> None:
    save(tmp_path / "mnist_train.csv", [HEADER, *LINES])
    save(tmp_path / "mnist_test.csv", [HEADER, *LINES[:10]])
    assert_rows(scan(tmp_path), {"train": (X, Y), "test": (X[:10], Y[:10])})
    assert_rows(scan(f"{tmp_path}/mnist_train.csv,{tmp_path}/mnist_test.csv"), {"train": (X, Y), "test": (X[:10], Y[:10])})


def test_a_test_file_without_labels_is_left_out_and_said(tmp_path: Path) -> None:
    save(tmp_path / "train.csv", [HEADER, *LINES])
    test = save(tmp_path / "test.csv", [line.split(",", 1)[1] for line in [HEADER, *LINES]])
    result = scan(tmp_path)
    assert_rows(result, {"train": (X, Y)})
    assert result.notes == [f"{test} has no label column, so it is not used for testing"]


def test_blank_lines_before_the_header_are_no_header(tmp_path: Path) -> None:
    path = save(tmp_path / "a.csv", ["", " ", HEADER, *LINES[:4], "11" + LINES[4][1:], *LINES[5:]])
    assert scan(path).bad == [f"{path}, line 8: label 11 is not in 0..9"]


def test_blank_lines_count_as_lines_and_are_no_rows(tmp_path: Path) -> None:
    lines = [HEADER, "", *LINES[:5], "", "", "10" + LINES[5][1:], *LINES[6:], "", ""]
    path = save(tmp_path / "a.csv", lines)
    assert scan(path).bad == [f"{path}, line 10: label 10 is not in 0..9"]


@pytest.mark.parametrize(
    ("field", "at", "text"),
    [
        ("10", 0, "label 10 is not in 0..9"),
        ("-1", 0, "label -1 is not in 0..9"),
        ("255", 0, "label 255 is not in 0..9"),
        ("3.5", 0, "label 3.5 is not a whole number"),
        ("cat", 0, "found 'cat', which is no number, in label"),
        ("", 0, "there is no value in label"),
        ("256", 3, "value 2 of x is 256; expected a whole number in 0..255"),
        ("-1", 1, "value 0 of x is -1; expected a whole number in 0..255"),
        ("3.5", 2, "value 1 of x is 3.5; expected a whole number in 0..255"),
        ("nan", 2, "there is no value in pixel1"),
        ("", 16, "there is no value in pixel15"),
        ("1e99", 16, "value 15 of x is 1e+99; expected a whole number in 0..255"),
        ("x y", 16, "found 'x y', which is no number, in pixel15"),
    ],
)
@pytest.mark.parametrize("header", [True, False])
def test_a_bad_field_names_its_line(tmp_path: Path, field: str, at: int, text: str, header: bool) -> None:
    fields = LINES[6].split(",")
    fields[at] = field
    lines = [*LINES[:6], ",".join(fields), *LINES[7:]]
    path = save(tmp_path / "a.csv", [HEADER, *lines] if header else lines)
    if not header:
        text = text.replace("in label", "in column 1").replace("in pixel15", "in column 17").replace("in pixel1", "in column 3")
    result = scan(path)
    assert result.bad == [f"{path}, line {8 if header else 7}: {text}"]
    np.testing.assert_array_equal(result.rows["train"][0], np.delete(X, 6, axis=0))


def test_a_line_of_another_width_is_lost_and_named(tmp_path: Path) -> None:
    lines = [HEADER, *LINES[:3], "1,2,3", *LINES[3:], LINES[0] + ",7"]
    path = save(tmp_path / "a.csv", lines)
    result = scan(path)
    assert result.bad == [f"{path}, line 5: found 3 columns; expected 17", f"{path}, line 23: found 18 columns; expected 17"]
    np.testing.assert_array_equal(result.rows["train"][0], X)


def test_bad_lines_of_several_kinds_are_all_found(tmp_path: Path) -> None:
    lines = [HEADER, *LINES[:3], "1,2,3", "x" + LINES[3][1:], *LINES[4:10], "", "12" + LINES[10][1:], *LINES[11:]]
    path = save(tmp_path / "a.csv", lines)
    result = scan(path)
    assert sorted(result.bad) == [
        f"{path}, line 14: label 12 is not in 0..9",
        f"{path}, line 5: found 3 columns; expected 17",
        f"{path}, line 6: found 'x', which is no number, in label",
    ]
    np.testing.assert_array_equal(result.rows["train"][0], np.delete(X, [3, 10], axis=0))


def test_bad_fields_late_in_a_large_file(tmp_path: Path) -> None:
    lines = [LINES[n % 20] for n in range(50_000)]
    lines[49_000] = "oops" + LINES[0][1:]
    path = save(tmp_path / "a.csv", lines)
    result = scan(path)
    assert result.bad == [f"{path}, line 49001: found 'oops', which is no number, in column 1"]
    assert len(result.rows["train"][1]) == 49_999


def test_lines_of_another_width_are_named_once_whatever_comes_after(tmp_path: Path) -> None:
    lines = [LINES[n % 20] for n in range(100_000)]
    for at in (5, 30_000, 70_000, 90_001):
        lines[at] = "1,2"
    lines[90_000] = "oops" + LINES[0][1:]
    path = save(tmp_path / "a.csv", lines)
    result = scan(path)
    assert sorted(result.bad) == sorted(
        [f"{path}, line {at + 1}: found 2 columns; expected 17" for at in (5, 30_000, 70_000, 90_001)]
        + [f"{path}, line 90001: found 'oops', which is no number, in column 1"]
    )
    assert len(result.rows["train"][1]) == 99_995


class _Ahead:
    """Arrow's reader, which always reads one piece ahead in a thread, as Arrow itself does whenever there is time."""

    def __init__(self, *args: object) -> None:
        self._reader = _OPEN(*args)
        self._next: object = None
        self.thread = threading.Thread()

    def __iter__(self) -> Iterator[object]:
        self._read()
        while (piece := self._next) is not None:
            self.thread = threading.Thread(target=self._read)
            self.thread.start()
            yield piece
            self.thread.join()

    def _read(self) -> None:
        self._next = next(self._reader, None)


def test_lines_that_are_read_ahead_are_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the rows of a piece are in use, a thread of Arrow's goes on and finds bad lines of the next ones."""
    readers: list[_Ahead] = []

    def ahead(*args: object) -> _Ahead:
        readers.append(_Ahead(*args))
        return readers[-1]

    monkeypatch.setattr(pa_csv, "open_csv", ahead)
    bad = range(250, 150_000, 500)
    path = save(tmp_path / "a.csv", ["1,2" if n in bad else LINES[n % 20] for n in range(150_000)])
    section, task = Data(source=str(path)), Digits()
    want = wanted(section, task)
    (part,) = plan_data(section, task, want).parts
    lost: list[str] = []
    rows: list[int] = []
    for batch in csv.read(part, want):
        readers[-1].thread.join()
        lost += batch.lost
        rows += list(batch.place.numbers)
    assert lost == [f"{path}, line {n + 1}: found 2 columns; expected 17" for n in bad]
    assert rows == [n + 1 for n in range(150_000) if n not in bad]


def test_bytes_that_are_no_text_are_shown_as_question_marks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "a.csv", [HEADER, *LINES[:3], "1,2,\ufffd", *LINES[3:5], "\ufffd" + LINES[5][1:]])
    path.write_bytes(path.read_bytes().replace("\ufffd".encode(), b"\xe2"))
    assert scan(path).bad == [
        f"{path}, line 5: found 3 columns; expected 17",
        f"{path}, line 8: found '?', which is no number, in label",
    ]
    assert capfd.readouterr().err == ""


def test_no_label_column_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "test.csv", [line.split(",", 1)[1] for line in [HEADER, *LINES]])
    assert scan(path).problem == f"{path} has no label column: found 16 columns, all pixels; expected 17, the label and 16 pixels"


def test_one_hot_is_refused_with_the_way_out_and_read_when_asked(tmp_path: Path) -> None:
    lines = [
        line.split(",", 1)[1] + "," + ",".join(str(int(n == y)) for n in range(10)) for line, y in zip(LINES, Y, strict=True)
    ]
    path = save(tmp_path / "a.csv", lines)
    assert scan(path).problem == (
        f"{path} has 26 columns; expected 17, the label and 16 pixels. If they are 16 pixels and then a one-hot label of 10, set "
        "data.one_hot: true"
    )
    assert_rows(scan(path, one_hot=True), {"train": (X, Y)})
    save(path, [*lines[:4], lines[4][:-1] + "1", *lines[5:]])
    assert scan(path, one_hot=True).bad[0].startswith(f"{path}, line 5: the one-hot label is [0.0, 0.0, 0.0, 0.0, 1.0")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "{path} is empty (0 bytes); get it again"),
        (b"\n\n", "{path} is not CSV: found the first bytes 0a 0a; expected text in UTF-8"),
        (b"<html><body>404</body></html>", "{path} is a web page and not data"),
        ("label,pixel0".encode("utf-16"), "{path} is not CSV: found the first bytes ff fe"),
        (b"\x00\x01\x02,\x03", "{path} is not CSV: found the first bytes 00 01 02 2c 03"),
        (b"a,b,c\n1,2,3\n", "{path} has 3 columns; expected 17, the label and 16 pixels"),
    ],
)
def test_files_that_are_something_else_are_refused(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    assert text.format(path=path) in scan(path).problem


def test_a_header_alone_has_no_rows(tmp_path: Path) -> None:
    assert len(scan(save(tmp_path / "a.csv", [HEADER])).rows["train"][1]) == 0


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.csv.gz", [HEADER, *LINES])
    path.write_bytes(path.read_bytes()[:-50])
    assert f"{path} is cut off" in scan(path).problem


def test_a_column_renamed_in_one_file_of_many_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.csv", [HEADER, *LINES])
    save(tmp_path / "b.csv", [HEADER, *LINES])
    odd = save(tmp_path / "c.csv", [HEADER.replace("pixel3", "pixel_3"), *LINES])
    assert scan(tmp_path).problem == f"{odd}: column 5 is named 'pixel_3'; expected 'pixel3', as in {tmp_path}/a.csv"


def test_float_tasks_take_fractions(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((20, 4, 4)).astype(np.float32)
    lines = [",".join(map(repr, [int(y), *map(float, row.ravel())])) for row, y in zip(x, Y, strict=True)]
    assert_rows(scan(save(tmp_path / "a.csv", lines), Floats()), {"train": (x, Y)})


class Flowers(Task):
    """A task with its own columns."""

    columns = Columns(shape=(2,), dtype="float32", num_classes=2)

    def prepare(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        x = np.stack([batch["length"], batch["width"]], axis=1)
        return {"features": x, "label": (batch["kind"] == "rose").astype(int)}


def test_a_task_prepares_its_own_columns(tmp_path: Path) -> None:
    path = save(tmp_path / "a.csv", ["length,width,kind", "1.5,2,rose", "3,4,tulip"])
    assert_rows(scan(path, Flowers()), {"train": (np.array([[1.5, 2], [3, 4]]), np.array([1, 0]))})


def test_what_a_task_prepares_is_checked_too(tmp_path: Path) -> None:
    path = save(tmp_path / "a.csv", ["length,width,kind", "1.5,,rose", "3,4,tulip"])
    assert scan(path, Flowers()).bad == [f"{path}, line 2: value 1 of x is nan; expected a finite number"]


def test_an_error_in_prepare_names_itself_and_the_columns(tmp_path: Path) -> None:
    path = save(tmp_path / "a.csv", ["long,width,kind", "1.5,2,rose"])
    text = scan(path, Flowers()).problem
    assert text.startswith(f"{path}: the task's prepare raised KeyError: 'length' (at {__file__}:")
    assert text.endswith("it was given 1 rows of columns long (float64), width (int64), kind (object)")


def test_prepare_must_keep_the_rows(tmp_path: Path) -> None:
    class Half(Digits):
        def prepare(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            return {"x": np.zeros((1, 4, 4)), "y": np.zeros(1)}

    path = save(tmp_path / "a.csv", ["a,b", "1,2", "3,4"])
    assert (
        "the task's prepare made 1 rows of x and 1 of y out of 2 rows; expected as many as it was given"
        in scan(path, Half()).problem
    )
