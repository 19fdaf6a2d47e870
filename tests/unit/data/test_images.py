"""Folders of images: classes and splits by folder, and files that are no such image."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raytrain_app.data.decode import BadImageError, decode
from tests.unit.data.making import assert_rows, images, scan

X = images(20)


def save(folder: Path, suffix: str = "png", classes: str = "0123456789") -> Path:
    for row, image in enumerate(X):
        path = folder / classes[row % 10] / f"{row:02}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return folder


def save_one(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir()
    Image.fromarray(image).save(path)


def by_class(rows: np.ndarray) -> np.ndarray:
    """In the order in which sorted folders have them."""
    return np.concatenate([rows[start::10] for start in range(10)])


EXPECTED = by_class(X), by_class(np.arange(20) % 10)


@pytest.mark.parametrize("suffix", ["png", "bmp", "PNG"])
def test_reads_a_folder_a_class(tmp_path: Path, suffix: str) -> None:
    assert_rows(scan(save(tmp_path, suffix)), {"train": EXPECTED})


def test_reads_a_folder_a_split(tmp_path: Path) -> None:
    save(tmp_path / "training")
    save(tmp_path / "testing")
    assert_rows(scan(tmp_path), {"train": EXPECTED, "test": EXPECTED})


def test_names_of_classes_are_numbered_in_order_and_said(tmp_path: Path) -> None:
    result = scan(save(tmp_path, classes="abcdefghij"))
    assert_rows(result, {"train": EXPECTED})
    assert result.notes[0].startswith("classes by folder: 0 is a, 1 is b, ")


def test_a_class_folder_named_like_a_split_is_a_class(tmp_path: Path) -> None:
    save_one(tmp_path / "test" / "a.png", X[0])
    save_one(tmp_path / "cat" / "b.png", X[1])
    assert_rows(scan(tmp_path), {"train": (X[[1, 0]], np.array([0, 1]))})


def test_too_many_classes_are_refused(tmp_path: Path) -> None:
    save(tmp_path, classes="abcdefghij")
    save_one(tmp_path / "k" / "a.png", X[0])
    assert scan(tmp_path).problem == (
        "found 11 class folders (a, b, c, d, e, ...); expected at most 10, the number of classes; set data.classes to it"
    )


def test_images_in_no_class_folder_are_refused(tmp_path: Path) -> None:
    Image.fromarray(X[0]).save(tmp_path / "a.png")
    assert (
        scan(tmp_path).problem
        == f"{tmp_path}/a.png is in no class folder; expected folders such as 3/image.png or train/3/image.png"
    )


def test_bad_images_are_named_by_file(tmp_path: Path) -> None:
    save(tmp_path)
    Image.fromarray(images(1, size=6)[0]).save(tmp_path / "0" / "00.png")
    Image.fromarray(X[1]).convert("RGBA").save(tmp_path / "1" / "01.png")
    (tmp_path / "2" / "02.png").write_bytes(b"")
    (tmp_path / "3" / "03.png").write_bytes((tmp_path / "3" / "03.png").read_bytes()[:45])
    (tmp_path / "4" / "04.png").write_bytes(b"<html>")
    result = scan(tmp_path)
    assert [text.split(": ")[0] for text in result.bad] == [f"{tmp_path}/{n}/0{n}.png" for n in range(5)]
    assert result.bad[0].endswith("found an image of 6 x 6; expected 4 x 4")
    assert "found an image of mode RGBA; expected L or 1" in result.bad[1]
    assert all("it cannot be decoded as an image" in text for text in result.bad[2:])
    assert len(result.rows["train"][1]) == 15


@pytest.mark.parametrize(
    ("size", "text"), [(9_000, "found an image of 9000 x 9000; expected 28 x 28"), (60_000, "it cannot be decoded as an image")]
)
def test_a_small_file_of_a_huge_image_is_refused_before_it_is_unpacked(size: int, text: str) -> None:
    header = b"IHDR" + struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    with pytest.raises(BadImageError, match=text):
        decode(png + struct.pack(">I", 10) + b"IDAT" + bytes(14), (28, 28))


def test_black_and_white_images_become_0_and_255() -> None:
    stream = io.BytesIO()
    Image.fromarray(np.eye(4, dtype=np.uint8) * 255).convert("1").save(stream, "PNG")
    np.testing.assert_array_equal(decode(stream.getvalue(), (4, 4)), np.eye(4) * 255)
