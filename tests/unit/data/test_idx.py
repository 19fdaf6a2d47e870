"""IDX: every layout that people have, and every way in which it breaks."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from raytrain_app.data.known import KNOWN
from tests.unit.data.making import Digits, Floats, assert_rows, idx_bytes, images, labels, scan, write, write_idx

EXPECTED = {"train": (images(20, 0), labels(20)), "test": (images(10, 1), labels(10))}
HTML = b"<!DOCTYPE html>\n<html><head><title>403 Forbidden</title></head>".ljust(727)


@pytest.mark.parametrize("gz", ["", ".gz"])
def test_reads_published_names(tmp_path: Path, gz: str) -> None:
    assert_rows(scan(write_idx(tmp_path, gz=gz)), EXPECTED)


def test_reads_dotted_names_in_subfolders(tmp_path: Path) -> None:
    for split, rows, seed in (("train", 20, 0), ("t10k", 10, 1)):
        write(tmp_path / "MNIST" / "raw" / f"{split}-images.idx3-ubyte", idx_bytes(images(rows, seed)))
        write(tmp_path / "MNIST" / "raw" / f"{split}-labels.idx1-ubyte", idx_bytes(labels(rows)))
    assert_rows(scan(tmp_path), EXPECTED)


def test_recognises_content_whatever_the_name(tmp_path: Path) -> None:
    write(tmp_path / "images.bin", idx_bytes(images(20)))
    write(tmp_path / "labels.bin", idx_bytes(labels(20)))
    assert_rows(scan(tmp_path), {"train": EXPECTED["train"]})


def test_prefers_the_raw_file_where_both_are(tmp_path: Path) -> None:
    write_idx(tmp_path)
    write(tmp_path / "train-images-idx3-ubyte.gz", idx_bytes(images(20, seed=9)))
    assert_rows(scan(tmp_path), EXPECTED)


def test_gzip_is_told_by_content_and_not_by_name(tmp_path: Path) -> None:
    write_idx(tmp_path)
    raw = tmp_path / "train-images-idx3-ubyte"
    raw.write_bytes(gzip.compress(raw.read_bytes()))
    assert_rows(scan(tmp_path), EXPECTED)


def test_large_files_are_read_in_parts(tmp_path: Path) -> None:
    write_idx(tmp_path, rows=200_000, test_rows=0)
    result = scan(tmp_path, order="windowed", window_mib=8)
    assert_rows(result, {"train": (images(200_000), labels(200_000))})


def test_emnist_letters_need_offset_and_transpose(tmp_path: Path) -> None:
    x, y = images(52), (1 + np.arange(52) % 26).astype(np.uint8)
    write(tmp_path / "emnist-letters-train-images-idx3-ubyte.gz", idx_bytes(x))
    write(tmp_path / "emnist-letters-train-labels-idx1-ubyte.gz", idx_bytes(y))
    assert scan(tmp_path).bad[0].endswith("emnist-letters-train-images-idx3-ubyte.gz, row 9: label 10 is not in 0..9")
    result = scan(tmp_path, classes=26, label_offset=1, transpose=True)
    assert_rows(result, {"train": (x.swapaxes(1, 2), y.astype(np.int64) - 1)})


def test_several_data_sets_in_one_folder_are_refused_and_a_glob_picks_one(tmp_path: Path) -> None:
    for name in ("letters", "digits"):
        for split in ("train", "test"):
            write(tmp_path / f"emnist-{name}-{split}-images-idx3-ubyte", idx_bytes(images(20)))
            write(tmp_path / f"emnist-{name}-{split}-labels-idx1-ubyte", idx_bytes(labels(20)))
    assert scan(tmp_path).problem == (
        f"found several IDX data sets together: emnist-digits, emnist-letters; name one with a glob, {tmp_path}/*emnist-letters*"
    )
    assert set(scan(f"{tmp_path}/*emnist-digits*").rows) == {"train", "test"}


def test_several_data_sets_in_one_tree_are_refused_with_their_folders(tmp_path: Path) -> None:
    for name in ("FashionMNIST", "MNIST"):
        write_idx(tmp_path / name / "raw")
    assert scan(tmp_path).problem == (
        "found several IDX data sets together: FashionMNIST/raw, MNIST/raw; name one of the folders "
        f"{tmp_path}/FashionMNIST/raw, {tmp_path}/MNIST/raw"
    )


def test_other_value_types(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((20, 4, 4)).astype(np.float32)
    write(tmp_path / "train-images-idx3-float", idx_bytes(x))
    write(tmp_path / "train-labels-idx1-int", idx_bytes(labels(20).astype(np.int32)))
    assert_rows(scan(tmp_path, Floats()), {"train": (x, labels(20))})


def damaged(folder: Path, name: str, data: bytes) -> Path:
    write_idx(folder)
    path = folder / name
    path.write_bytes(data)
    if name.endswith(".gz"):
        (folder / name.removesuffix(".gz")).unlink()
    return path


def problems_of(folder: Path) -> str:
    return "\n".join(scan(folder).problems)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "{path} is empty (0 bytes); get it again"),
        (3, "{path} is not IDX: found the first bytes 00 00 08; expected 00 00 08 03 (magic 2051) for images"),
        (8, "{path} is cut off: it ends after 8 bytes, within its header of 16 bytes; get it again"),
        (20, "{path} is cut off: found 20 bytes; its header says 20 x 4 x 4 values, so expected 336 bytes; get it again"),
        (176, "{path} is cut off: found 176 bytes; its header says 20 x 4 x 4 values, so expected 336 bytes; get it again"),
    ],
)
def test_cut_raw_files_are_refused(tmp_path: Path, size: int, text: str) -> None:
    path = damaged(tmp_path, "train-images-idx3-ubyte", idx_bytes(images(20))[:size])
    assert text.format(path=path) in problems_of(tmp_path)


def test_oversized_raw_files_are_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path, "train-labels-idx1-ubyte", idx_bytes(labels(20)) + b"\0")
    assert problems_of(tmp_path) == (
        f"{path} is too long: found 29 bytes; its header says 20 values, so expected 28 bytes; get it again"
    )


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.9, 0.99])
def test_a_gzip_file_cut_anywhere_is_refused(tmp_path: Path, keep: float) -> None:
    packed = gzip.compress(idx_bytes(images(20)), mtime=0)
    path = damaged(tmp_path, "train-images-idx3-ubyte.gz", packed[: int(len(packed) * keep)])
    assert f"{path} is cut off" in problems_of(tmp_path)


def test_content_cut_before_it_was_gzipped_is_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path, "train-images-idx3-ubyte.gz", gzip.compress(idx_bytes(images(20))[:-20]))
    assert problems_of(tmp_path) == (
        f"{path} is cut off: found 316 bytes, 18 whole rows; its header says 20 rows, so expected 336 bytes; get it again"
    )


def test_gzipped_content_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path, "train-images-idx3-ubyte.gz", gzip.compress(idx_bytes(images(20)) + b"\1"))
    assert problems_of(tmp_path) == (
        f"{path} is too long: there are bytes after the 20 rows that its header says; expected 336 bytes in all; get it again"
    )


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(idx_bytes(images(20)), mtime=0))
    packed[-6] ^= 255  # the checksum
    path = damaged(tmp_path, "train-images-idx3-ubyte.gz", bytes(packed))
    assert f"{path} is damaged: its gzip data cannot be unpacked (CRC check failed" in problems_of(tmp_path)


def test_html_saved_as_gz_names_first_bytes_and_what_was_expected(tmp_path: Path) -> None:
    path = damaged(tmp_path, "train-images-idx3-ubyte.gz", HTML)
    file = KNOWN["mnist"].files[0]
    text = problems_of(tmp_path)
    assert f"{path} is a web page and not data: it has 727 bytes and starts with b'<!DOCTYPE html>\\n" in text
    assert f"MNIST's {file.size:,} bytes with sha256 {file.sha256}" in text


def test_wrong_magic_is_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path, "train-images-idx3-ubyte", b"\x03\x08\0\0" + idx_bytes(images(20))[4:])
    assert f"{path} is not IDX: found the first bytes 03 08 00 00; expected 00 00 08 03 (magic 2051)" in problems_of(tmp_path)


def test_swapped_files_are_refused(tmp_path: Path) -> None:
    write_idx(tmp_path, test_rows=0)
    a, b = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    swapped = a.read_bytes(), b.read_bytes()
    b.write_bytes(swapped[0])
    a.write_bytes(swapped[1])
    assert f"{a} holds labels, but its name says images: found 20 values; expected images" in problems_of(tmp_path)
    assert f"{b} holds images, but its name says labels: found 20 x 4 x 4 values; expected labels" in problems_of(tmp_path)


def test_counts_that_differ_are_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path, "train-labels-idx1-ubyte", idx_bytes(labels(19)))
    assert f"train-images-idx3-ubyte has 20 images, but {path} has 19 labels; expected as many of both" in problems_of(tmp_path)


def test_missing_labels_are_refused(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    assert problems_of(tmp_path) == (
        f"{tmp_path}/t10k-images-idx3-ubyte has no file of labels beside it; expected one of the same name with labels in the "
        "place of images"
    )


def test_other_image_size_is_refused(tmp_path: Path) -> None:
    write_idx(tmp_path, size=5, test_rows=0)
    assert f"{tmp_path}/train-images-idx3-ubyte has images of 5 x 5; the task expects 4 x 4" in problems_of(tmp_path)


def test_a_header_that_lies_about_size_is_refused_at_once(tmp_path: Path) -> None:
    data = idx_bytes(images(20))
    path = damaged(tmp_path, "train-images-idx3-ubyte.gz", gzip.compress(data[:4] + b"\xff\xff\xff\xff" + data[8:]))
    assert f"{path} is damaged: its header says 4294967295 x 4 x 4 values, which its" in problems_of(tmp_path)


@pytest.mark.parametrize("label", [10, 255])
def test_bad_labels_name_file_and_row(tmp_path: Path, label: int) -> None:
    y = labels(20)
    y[13] = label
    write_idx(tmp_path, test_rows=0)
    write(tmp_path / "train-labels-idx1-ubyte", idx_bytes(y))
    result = scan(tmp_path)
    assert result.bad == [f"{tmp_path}/train-images-idx3-ubyte, row 13: label {label} is not in 0..9"]
    assert len(result.rows["train"][1]) == 19


def test_flipped_pixels_of_a_well_known_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path, test_rows=0)
    # Let these small files be as well known as MNIST's.
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        monkeypatch.setitem(
            __import__("raytrain_app.data.known", fromlist=["x"]).RAW_SIZES, name, (tmp_path / name).stat().st_size
        )
    text = problems_of(tmp_path)
    assert (
        "train-images-idx3-ubyte has the name and the size of a well-known file but has other content: unpacked, found sha256"
        in text
    )
    assert "expected ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db (MNIST)" in text
    assert "set data.allow_modified: true" in text
    assert scan(tmp_path, allow_modified=True).problems == []


def test_rows_keep_their_bits(tmp_path: Path) -> None:
    write_idx(tmp_path)
    x, y = scan(tmp_path, Digits()).rows["train"]
    assert (x.dtype.name, y.dtype.name) == ("uint8", "int64")
