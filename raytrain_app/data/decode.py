"""Image files to arrays."""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image

from raytrain_app.data.parts import times

_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")
_MODES = {1: ("L", "1"), 3: ("RGB",), 4: ("RGBA",)}


class BadImageError(ValueError):
    """Why an image cannot be used, as the end of a sentence."""


def decode(data: bytes, shape: tuple[int, ...] | None) -> np.ndarray:
    """Decodes an image file.

    Args:
        data: the whole file.
        shape: (height, width) or (height, width, 1) for greyscale, (height, width, 3) for colours; None accepts any.

    Returns:
        uint8 array of `shape`.

    Raises:
        BadImageError: the file is no image, is cut off, or has another size or mode. An image's size is compared before its
            pixels are unpacked, so a small file cannot fill the memory.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            if shape is not None:
                _check(image, shape)
            array = np.asarray(image)
    except BadImageError:
        raise
    except Exception as error:  # Pillow's decoders raise anything from SyntaxError to struct.error for damaged files.
        raise BadImageError(f"it cannot be decoded as an image ({str(error)[:120] or type(error).__name__})") from None
    if array.dtype == bool:
        array = array.astype(np.uint8) * np.uint8(255)
    return array if shape is None else array.reshape(shape)


def _check(image: Image.Image, shape: tuple[int, ...]) -> None:
    height, width, channels = (*shape, 1)[:3] if len(shape) in (2, 3) else (0, 0, 0)
    if (image.height, image.width) != (height, width):
        raise BadImageError(f"found an image of {image.height} x {image.width}; expected {times(shape)}")
    if image.mode not in _MODES.get(channels, ()):
        raise BadImageError(
            f"found an image of mode {image.mode}; expected {' or '.join(_MODES.get(channels, ('none',)))}; convert it, or "
            "override the task's prepare"
        )
