"""Damaged and hostile files end in sentences: reading returns or raises DataError, whatever the bytes."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.unit.data.making import Digits, Scan, idx_bytes, images, labels, scan

X, Y = images(20), labels(20)


def npz() -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, x=X, y=Y)
    return stream.getvalue()


def parquet() -> bytes:
    stream = io.BytesIO()
    table = pa.table({"image": [row.ravel().tolist() for row in X], "label": Y, "split": ["train"] * 20})
    pq.write_table(table, stream, row_group_size=7, write_page_checksum=True)
    return stream.getvalue()


def csv() -> bytes:
    return "".join(",".join(map(str, [y, *x.ravel()])) + "\n" for x, y in zip(X, Y, strict=True)).encode()


def png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(X[0]).save(stream, "PNG")
    return stream.getvalue()


class Own(Digits):
    """A task that prepares its own columns gets them as the file has them."""

    def prepare(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return batch


TASKS = st.sampled_from([Digits(), Own()])

FILES: dict[str, Callable[[], bytes]] = {
    "train-images-idx3-ubyte": lambda: idx_bytes(X),
    "train-images-idx3-ubyte.gz": lambda: gzip.compress(idx_bytes(X), mtime=0),
    "train-labels-idx1-ubyte": lambda: idx_bytes(Y),
    "a.npz": npz,
    "a.parquet": parquet,
    "a.csv": csv,
    "a.csv.gz": lambda: gzip.compress(csv(), mtime=0),
    "3/a.png": png,
}


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """A file with bytes changed, taken out, put in or cut off."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(result) - 1, 0)))
        how = draw(st.sampled_from(["flip", "cut", "insert", "delete", "fill"]))
        if how == "flip" and result:
            result[at] ^= draw(st.integers(1, 255))
        elif how == "cut":
            del result[at:]
        elif how == "insert":
            result[at:at] = draw(st.binary(min_size=1, max_size=9))
        elif how == "delete":
            del result[at : at + draw(st.integers(1, 9))]
        elif how == "fill":
            result[at : at + 4] = draw(st.sampled_from([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\x80\0\0\0"]))
    return bytes(result)


def assert_plain(result: Scan) -> None:
    """What reading says is text for people, and every row that it lets through is right."""
    for text in result.problems + result.bad:
        assert "Traceback" not in text
        assert 20 < len(text) < 2000
    for x, y in result.rows.values():
        assert (x.shape[1:], x.dtype.name, y.dtype.name, len(x)) == ((4, 4), "uint8", "int64", len(y))
        assert ((y >= 0) & (y < 10)).all()


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_end_in_sentences(tmp_path: Path, name: str, data: st.DataObject) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if "idx" in name:
        (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_bytes(X))
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(Y))
        if name.endswith(".gz"):
            (tmp_path / "train-images-idx3-ubyte").unlink(missing_ok=True)
    path.write_bytes(data.draw(mutated(FILES[name]())))
    assert_plain(scan(tmp_path if "idx" in name or "/" in name else path, data.draw(TASKS)))


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), task=TASKS)
def test_arbitrary_bytes_end_in_sentences(tmp_path: Path, name: str, content: bytes, task: Digits) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert_plain(scan(tmp_path if "/" in name else path, task))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from('0123456789,;."\n\r\t -+eEnaNinfé\0'), max_size=400), task=TASKS)
def test_arbitrary_text_ends_in_sentences(tmp_path: Path, text: str, task: Digits) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert_plain(scan(tmp_path / "a.csv", task))
