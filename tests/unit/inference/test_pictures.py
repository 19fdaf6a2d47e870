"""Any picture becomes a row, or is refused with a reason; what was done is said."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from raytrain_app.inference.pictures import MOST_BYTES, BadPictureError, Invert, Row, rows_of
from raytrain_app.task import Columns, Pictures

DIGITS = Columns((28, 28), "uint8", 10)
MNIST = Pictures(light_on_dark=True, ink=20)
WHOLE = Pictures(light_on_dark=True)


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def one(data: bytes, pictures: Pictures = MNIST, columns: Columns = DIGITS, name: str = "a.png", invert: Invert = "auto") -> Row:
    (row,) = rows_of(name, data, columns, pictures, invert)
    assert row.x.shape == columns.shape
    assert row.x.dtype == columns.dtype
    return row


def seven(size: int = 28, at: tuple[int, int] = (0, 0), canvas: tuple[int, int] | None = None) -> Image.Image:
    """A light 7 on dark, drawn in a square of `size` at a place of a canvas."""
    image = Image.new("L", canvas or (size, size), 0)
    draw, unit = ImageDraw.Draw(image), size / 28
    places = [(8, 6), (20, 6), (12, 22)]
    draw.line([(at[0] + x * unit, at[1] + y * unit) for x, y in places], fill=255, width=max(2, round(2.5 * unit)))
    return image


def mass_centre(x: np.ndarray) -> tuple[float, float]:
    values, places = x.astype(float), np.arange(28)
    return float((values.sum(1) * places).sum() / values.sum()), float((values.sum(0) * places).sum() / values.sum())


# ---- what is right already ----


def test_a_picture_of_the_right_kind_is_taken_as_it_is() -> None:
    x = np.random.default_rng(0).integers(0, 256, (28, 28), np.uint8)
    x[0] = 0
    row = one(encoded(Image.fromarray(x)))
    assert np.array_equal(row.x, x)
    assert row.done == []


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "LA", "CMYK"])
def test_grey_in_other_modes_keeps_its_values(mode: str) -> None:
    x = np.asarray(seven())
    form = "TIFF" if mode == "CMYK" else "PNG"
    row = one(encoded(seven().convert("RGB").convert(mode), form), name="a.tif")
    assert np.abs(row.x.astype(int) - x).max() <= 1
    assert row.done == []


def test_one_bit_and_sixteen_bit_pictures() -> None:
    assert np.array_equal(one(encoded(seven().convert("1"))).x, np.asarray(seven()))
    deep = Image.fromarray(np.asarray(seven()).astype(np.uint16) * 257)
    row = one(encoded(deep))
    assert np.array_equal(row.x, np.asarray(seven()))
    assert row.done == ["16 bits to 8"]


def test_colour_becomes_grey_and_is_said() -> None:
    red = Image.merge("RGB", (seven(), Image.new("L", (28, 28)), Image.new("L", (28, 28))))
    row = one(encoded(red))
    assert row.x.max() == 76  # the share of red in lightness, ITU-R BT.601
    assert row.done == ["colour to grey"]


# ---- inversion ----


def test_dark_on_light_is_inverted_and_said() -> None:
    inverted = Image.fromarray(255 - np.asarray(seven()))
    row = one(encoded(inverted))
    assert np.array_equal(row.x, np.asarray(seven()))
    assert row.done == ["inverted, since it was dark on light"]
    assert np.array_equal(one(encoded(inverted), invert="never").x, np.asarray(inverted))
    assert np.array_equal(one(encoded(seven()), invert="always").x, np.asarray(inverted))


def test_tasks_whose_images_may_be_bright_are_left_alone() -> None:
    inverted = Image.fromarray(255 - np.asarray(seven()))
    assert np.array_equal(one(encoded(inverted), Pictures()).x, np.asarray(inverted))


def test_no_row_of_mnist_is_inverted() -> None:
    import pyarrow.parquet as pq

    import raytrain_app.data

    path = Path(raytrain_app.data.__file__).parent / "embedded" / "mnist-10k.parquet"
    for values in pq.read_table(path)["image"].to_pylist()[:500]:
        assert one(npy(np.array(values, np.uint8).reshape(28, 28)), name="a.npy").done == []


# ---- size ----


@pytest.mark.parametrize("at", [(0, 0), (150, 40), (300, 220)])
def test_ink_is_cut_out_scaled_and_centred(at: tuple[int, int]) -> None:
    row = one(encoded(seven(200, at, (600, 460))))
    rows, columns = np.flatnonzero(row.x.max(1) > 64), np.flatnonzero(row.x.max(0) > 64)
    assert max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1 in (19, 20)
    assert mass_centre(row.x) == pytest.approx((14, 14), abs=0.75)
    assert row.x.max() > 200
    (done,) = row.done
    assert done.startswith("ink cut out of 600 x 460, scaled to ")


def test_faint_ink_on_grey_paper_becomes_white_on_black() -> None:
    paper = np.full((300, 300), 190, np.uint8)
    paper[np.asarray(seven(300)) > 128] = 130
    row = one(encoded(Image.fromarray(paper), "JPEG", quality=90), name="photo.jpg")
    assert row.x.max() > 200
    assert np.median(row.x) == 0
    assert row.done[0] == "inverted, since it was dark on light"


def test_the_whole_picture_is_scaled_with_its_proportions_where_it_is_the_thing() -> None:
    row = one(encoded(Image.new("L", (100, 50), 200)), Pictures())
    assert row.done == ["scaled from 100 x 50 to 28 x 28"]
    assert (row.x == 200).all()
    half = np.zeros((50, 100), np.uint8)
    half[:, 50:] = 255
    x = one(encoded(Image.fromarray(half)), Pictures()).x
    assert x[7:21, 20:].min() > 200
    assert x[7:21, :8].max() < 50


def test_colours_stay_where_the_task_has_colours() -> None:
    columns = Columns((8, 8, 3), "uint8", 2)
    row = one(encoded(Image.new("RGBA", (16, 16), (10, 20, 200, 255))), Pictures(), columns)
    assert (row.x == [10, 20, 200]).all()


def test_a_phone_photo_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 270 degrees
    sideways = seven().transpose(Image.Transpose.ROTATE_90)
    row = one(encoded(sideways, "JPEG", exif=exif, quality=100, subsampling=0), name="a.jpg")
    assert np.abs(row.x.astype(int) - np.asarray(seven())).mean() < 3
    assert row.done == ["turned upright as its EXIF data says"]


def test_transparency_is_put_before_what_it_stands_out_from() -> None:
    alpha = seven(200).convert("L")
    dark = Image.merge("LA", (Image.new("L", (200, 200), 0), alpha))
    row = one(encoded(dark))
    assert "transparency to white" in row.done
    assert row.x.max() > 200
    light = Image.merge("LA", (Image.new("L", (200, 200), 255), alpha))
    assert "transparency to black" in one(encoded(light)).done


# ---- arrays ----


def test_arrays_of_one_row_and_of_many() -> None:
    x = np.asarray(seven())
    assert np.array_equal(one(npy(x), name="a.npy").x, x)
    rows = rows_of("a.npy", npy(np.stack([x, x])), DIGITS, MNIST)
    assert [row.part for row in rows] == [0, 1]
    row = one(npy(x / 255.0), name="a.npy")
    assert np.array_equal(row.x, x)
    assert row.done == ["values from 0 to 1 multiplied by 255"]
    assert np.array_equal(one(npy(x.astype(np.float64)), name="a.npy").x, x)


def test_rows_that_are_no_pictures_come_as_arrays_only() -> None:
    columns = Columns((16,), "float32", 4)
    assert len(rows_of("a.npy", npy(np.zeros((3, 16))), columns, Pictures())) == 3
    with pytest.raises(BadPictureError, match=r"is no \.npy file"):
        rows_of("a.png", encoded(seven()), columns, Pictures())


# ---- hostile and useless files ----


def bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """A PNG of a few bytes that claims to be gigabytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def lying_npy() -> bytes:
    """An array file whose header tells of terabytes."""
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000, 28, 28000), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 10


NOTHING = Image.new("L", (100, 100), 255)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.png", b"", "is empty"),
        ("a.png", b"hello, I am a text file" * 10, "its bytes are none of PNG, JPEG"),
        ("a.png", b"<html>404</html>", "its bytes are none of"),
        ("a.png", encoded(seven(300))[:200], "cannot be read as a picture"),
        ("a.jpg", encoded(seven(300), "JPEG")[:-400], "truncated"),
        ("a.png", bomb(), "far more pixels than"),
        ("a.png", bomb(9000, 9000), "9,000 x 9,000 pixels; expected at most"),
        ("a.png", bomb(3000, 3000), "cannot be read as a picture"),
        ("a.png", b"\0" * (MOST_BYTES + 1), "expected at most"),
        ("a.png", encoded(NOTHING), "nothing that stands out"),
        ("a.png", encoded(Image.new("RGBA", (40, 40), (0, 0, 0, 0))), "is wholly transparent"),
        ("a.npy", b"not numpy", "cannot be read as a .npy file"),
        ("a.npy", lying_npy(), "its header tells of"),
        ("a.npy", npy(np.zeros((28, 28), np.uint8))[:-1], "is cut off or damaged"),
        ("a.npy", npy(np.array([{"a": 1}], object)), "dtype object"),
        ("a.npy", npy(np.array(["x"])), "expected numbers"),
        ("a.npy", npy(np.zeros((5, 7, 9))), "expected (28, 28), or (rows, 28, 28)"),
        ("a.npy", npy(np.full((28, 28), 300)), "has values from 300 to 300"),
        ("a.npy", npy(np.full((28, 28), np.nan)), "not finite"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason(name: str, data: bytes, said: str) -> None:
    with pytest.raises(BadPictureError) as refusal:
        rows_of(name, data, DIGITS, MNIST)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@given(
    st.binary(max_size=300),
    st.sampled_from(["a.png", "a.npy"]),
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"\x93NUMPY\x01\x00"]),
)
def test_any_bytes_are_a_row_or_refused(data: bytes, name: str, head: bytes) -> None:
    try:
        rows = rows_of(name, head + data, DIGITS, MNIST)
    except BadPictureError:
        return
    assert all(row.x.shape == (28, 28) for row in rows)


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=8), st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"]))
def test_damaged_pictures_are_a_row_or_refused(place: int, change: bytes, form: str) -> None:
    data = bytearray(encoded(seven(64).convert("RGB"), form))
    place %= len(data)
    data[place : place + len(change)] = change
    try:
        rows = rows_of("a.img", bytes(data), DIGITS, WHOLE)
    except BadPictureError:
        return
    assert rows[0].x.shape == (28, 28)
