"""Any picture as a row of the kind a model was trained on, with an account of what was done to it.

A picture of the right size and mode is taken as it is. For tasks whose images are light on dark, one with a bright border is
inverted. A picture of another size is scaled; where the task's images are centred (MNIST digits), the ink is cut out, its
longer side scaled to the task's size, and its centre of mass put in the middle, as LeCun et al. made MNIST.
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from raytrain_app.task import Columns, Pictures

Invert = Literal["auto", "always", "never"]

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")
MOST_BYTES, MOST_PIXELS = 64 << 20, 64_000_000
"""Limits of a file and of what it may unpack to: a few kilobytes can claim to be a picture of gigabytes."""
BRIGHT, BRIGHT_SHARE = 128, 0.75
"""A border is bright where this share of its pixels is at least so light. No image of MNIST or Fashion-MNIST has one."""
LEAST_CONTRAST = 24
"""Lightest minus darkest pixel below which there is nothing to see in a picture."""


class BadPictureError(ValueError):
    """Why a picture cannot be used, as the end of a sentence that begins with its name."""


@dataclass
class Row:
    """A row for the model, and what was done to get it.

    Attributes:
        x: of the columns' shape and dtype.
        done: what was done, in order, for people; empty where it was taken as it is.
        part: number of the row in a file of several, None for a file of one.
    """

    x: np.ndarray
    done: list[str] = field(default_factory=list)
    part: int | None = None


def rows_of(name: str, data: bytes, columns: Columns, pictures: Pictures, invert: Invert = "auto") -> list[Row]:
    """The rows in a file.

    Args:
        name: of the file; ".npy" is an array of one row or many, everything else a picture.
        data: the file's bytes.
        columns: of the task.
        pictures: what the task's images look like.
        invert: whether to swap light and dark: as the picture's border tells, or as the user says.

    Raises:
        BadPictureError: the file is damaged, too large, or not what the task takes.
    """
    if len(data) > MOST_BYTES:
        raise BadPictureError(f"has {len(data):,} bytes; expected at most {MOST_BYTES:,}")
    if not data:
        raise BadPictureError("is empty (0 bytes)")
    if name.lower().endswith(".npy"):
        return _array_rows(data, columns, pictures, invert)
    if not _is_image(columns):
        raise BadPictureError(f"is no .npy file, and the task takes rows of shape {columns.shape}, which are no pictures")
    return [_fit(_opened(data), columns, pictures, invert)]


def _is_image(columns: Columns) -> bool:
    shape = columns.shape
    return len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))


# ---- opening ----


def _opened(data: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > MOST_PIXELS:
                raise BadPictureError(f"unpacks to {image.width:,} x {image.height:,} pixels; expected at most {MOST_PIXELS:,}")
            image.load()
            return image
    except BadPictureError:
        raise
    except Image.DecompressionBombError:
        raise BadPictureError(f"unpacks to far more pixels than the {MOST_PIXELS:,} that are expected at most") from None
    except Exception as error:  # Pillow's decoders raise anything from SyntaxError to struct.error for damaged files
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        if "cannot identify" in reason:
            reason = f"its bytes are none of {', '.join(FORMATS)}"
        raise BadPictureError(f"cannot be read as a picture: {reason}") from None


def _array_rows(data: bytes, columns: Columns, pictures: Pictures, invert: Invert) -> list[Row]:
    array = _array(data)
    shape = columns.shape
    if array.shape == shape or array.shape[1:] == shape:
        many = array.shape != shape
        x, done = _converted(array if many else array[None], columns)
        rows = [Row(row, list(done), place if many else None) for place, row in enumerate(x)]
        if _is_image(columns) and columns.dtype == "uint8":
            for row in rows:
                row.x = _light_on_dark(row.x, pictures, invert, row.done)
        return rows
    if _is_image(columns) and array.dtype == np.uint8 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        return [_fit(Image.fromarray(np.ascontiguousarray(array)), columns, pictures, invert)]
    raise BadPictureError(f"has an array of shape {array.shape}; expected {shape}, or {('rows', *shape)}".replace("'", ""))


def _array(data: bytes) -> np.ndarray:
    """Reads a .npy file, its header first: what it claims must be there."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except (ValueError, TypeError, SyntaxError) as error:
        raise BadPictureError(f"cannot be read as a .npy file: {' '.join(str(error).split())[:120]}") from None
    if dtype.hasobject or dtype.kind not in "uifb":
        raise BadPictureError(f"has an array of dtype {dtype}; expected numbers")
    claimed, there = math.prod(shape) * dtype.itemsize, len(data) - file.tell()
    if claimed != there:
        raise BadPictureError(f"is cut off or damaged: its header tells of {claimed:,} bytes of data and there are {there:,}")
    file.seek(0)
    return np.asarray(np.load(file, allow_pickle=False))


def _converted(array: np.ndarray, columns: Columns) -> tuple[np.ndarray, list[str]]:
    """The same values in the columns' dtype; values from 0 to 1 are taken for shares of 255 where pixels are bytes."""
    if not np.isfinite(array).all():
        raise BadPictureError("has values that are not finite")
    if columns.dtype != "uint8":
        return array.astype(columns.dtype), []
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    if low >= 0 and 0 < high <= 1:
        return np.round(array * 255).astype(np.uint8), ["values from 0 to 1 multiplied by 255"]
    if low < 0 or high > 255:
        raise BadPictureError(f"has values from {low:g} to {high:g}; expected 0 to 255, or 0 to 1")
    return array.astype(np.uint8), []


# ---- fitting ----


def _fit(image: Image.Image, columns: Columns, pictures: Pictures, invert: Invert) -> Row:
    height, width = columns.shape[:2]
    done: list[str] = []
    turned = ImageOps.exif_transpose(image)
    if turned.size != image.size or image.getexif().get(0x0112, 1) != 1:
        done.append("turned upright as its EXIF data says")
    image = _flat(turned, done)
    colours = len(columns.shape) == 3 and columns.shape[2] == 3
    if colours:
        x = _scaled(np.asarray(image.convert("RGB")), height, width, done)
    else:
        if image.mode != "L" and np.ptp(np.asarray(image), axis=2).any():
            done.append("colour to grey")
        x = _light_on_dark(np.asarray(image.convert("L")), pictures, invert, done)
        if x.shape != (height, width):
            x = _centred(x, height, width, pictures.ink, done) if pictures.ink else _scaled(x, height, width, done)
    return Row(np.ascontiguousarray(x.reshape(columns.shape).astype(columns.dtype)), done)


def _flat(image: Image.Image, done: list[str]) -> Image.Image:
    """Grey or RGB with 8 bits, without transparency, and of a size that is quick to work with."""
    if image.mode in ("I;16", "I;16B", "I;16L", "I"):
        values = np.asarray(image).astype(np.int64)
        done.append("16 bits to 8")
        return Image.fromarray((values // (257 if values.max(initial=0) > 255 else 1)).clip(0, 255).astype(np.uint8))
    if image.mode == "F":
        raise BadPictureError("has float pixels; expected 8 or 16 bits, or save it as .npy")
    if image.mode in ("1", "L", "RGB"):
        image = image.convert("RGB" if image.mode == "RGB" else "L")
    elif "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = _opaque(image.convert("RGBA"), done)
    else:
        image = image.convert("RGB")
    image.thumbnail((2048, 2048))
    return image


def _opaque(image: Image.Image, done: list[str]) -> Image.Image:
    """Puts what can be seen before a background it stands out from."""
    pixels = np.asarray(image).astype(np.float64)
    alpha = pixels[..., 3]
    if not alpha.any():
        raise BadPictureError("is wholly transparent")
    if alpha.min() == 255:
        return image.convert("RGB")
    lightness = float((pixels[..., :3].mean(axis=2) * alpha).sum() / alpha.sum())
    name, value = ("white", 255) if lightness < 128 else ("black", 0)
    done.append(f"transparency to {name}")
    background = Image.new("RGBA", image.size, (value, value, value, 255))
    return Image.alpha_composite(background, image).convert("RGB")


def _light_on_dark(x: np.ndarray, pictures: Pictures, invert: Invert, done: list[str]) -> np.ndarray:
    flat = x.reshape(x.shape[:2]) if x.ndim == 3 and x.shape[2] == 1 else x
    if flat.ndim != 2 or invert == "never":
        return x
    border = np.concatenate([flat[0], flat[-1], flat[1:-1, 0], flat[1:-1, -1]])
    bright = (border >= BRIGHT).mean() >= BRIGHT_SHARE
    if invert == "always" or (pictures.light_on_dark and bright):
        done.append("inverted, since it was dark on light" if bright else "inverted")
        return np.asarray(255 - x)
    return x


def _scaled(x: np.ndarray, height: int, width: int, done: list[str]) -> np.ndarray:
    """The whole picture in the size wanted, with its proportions, and its border's value where it does not reach."""
    if x.shape[:2] == (height, width):
        return x
    factor = min(height / x.shape[0], width / x.shape[1])
    size = max(1, round(x.shape[1] * factor)), max(1, round(x.shape[0] * factor))
    small = np.asarray(Image.fromarray(x).resize(size, Image.Resampling.LANCZOS))
    border = np.concatenate([x[0], x[-1], x[:, 0], x[:, -1]])
    canvas = np.empty((height, width, *x.shape[2:]), np.uint8)
    canvas[:] = np.median(border, axis=0).astype(np.uint8)
    top, left = (height - size[1]) // 2, (width - size[0]) // 2
    canvas[top : top + size[1], left : left + size[0]] = small
    done.append(f"scaled from {x.shape[1]} x {x.shape[0]} to {width} x {height}")
    return canvas


def _centred(x: np.ndarray, height: int, width: int, ink: int, done: list[str]) -> np.ndarray:
    """The ink alone, its longer side `ink` pixels long, with its centre of mass in the middle."""
    border = np.concatenate([x[0], x[-1], x[:, 0], x[:, -1]])
    values = x.astype(np.float64) - float(np.median(border))
    peak = float(values.max())
    if peak < LEAST_CONTRAST:
        raise BadPictureError("shows nothing that stands out from its background")
    values = (values * (255.0 / peak)).clip(0, 255)
    rows, columns = np.flatnonzero((values > 64).any(axis=1)), np.flatnonzero((values > 64).any(axis=0))
    cut = values[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    factor = ink / max(cut.shape)
    size = max(1, round(cut.shape[1] * factor)), max(1, round(cut.shape[0] * factor))
    small = np.asarray(Image.fromarray(cut.astype(np.uint8)).resize(size, Image.Resampling.LANCZOS)).astype(np.float64)
    mass = max(float(small.sum()), 1.0)
    centre_y = float((small.sum(axis=1) * np.arange(size[1])).sum()) / mass
    centre_x = float((small.sum(axis=0) * np.arange(size[0])).sum()) / mass
    top = min(max(round(height / 2 - centre_y), 0), height - size[1])
    left = min(max(round(width / 2 - centre_x), 0), width - size[0])
    canvas = np.zeros((height, width), np.uint8)
    canvas[top : top + size[1], left : left + size[0]] = small.astype(np.uint8)
    done.append(f"ink cut out of {x.shape[1]} x {x.shape[0]}, scaled to {size[0]} x {size[1]} and centred in {width} x {height}")
    return canvas
