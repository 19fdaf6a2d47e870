"""Curves made of braille characters, each of which holds two columns of four dots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

# Bits of the dots of a braille character, by row from the top and column.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_LABEL_WIDTH = 7


@dataclass(frozen=True)
class Curve:
    """A line: ascending x and y, each of shape (n,), and its colour."""

    x: np.ndarray
    y: np.ndarray
    style: str


def plot(curves: Sequence[Curve], width: int, height: int, *, log: bool = False) -> Text:
    """Draws curves over the same axes, later ones over earlier ones.

    Args:
        curves: those without points are left out.
        width: characters, with the numbers at the left.
        height: lines.
        log: whether the y axis is logarithmic; values that are not above 0 are left out.
    """
    lines = [_prepared(curve, log) for curve in curves]
    lines = [curve for curve in lines if len(curve.x)]
    if not lines:
        return Text("\n" * (height - 1), end="")
    low_x, high_x = min(float(c.x[0]) for c in lines), max(float(c.x[-1]) for c in lines)
    low_y, high_y = min(float(c.y.min()) for c in lines), max(float(c.y.max()) for c in lines)
    columns, rows = max(1, width - _LABEL_WIDTH - 1), height
    codes, styles = np.zeros((rows, columns), np.int64), np.full((rows, columns), "", object)
    for curve in lines:
        dots = _dots(curve, (low_x, high_x), (low_y, high_y), columns * 2, rows * 4)
        for row, column in zip(*np.nonzero(dots), strict=True):
            codes[row // 4, column // 2] |= _DOTS[row % 4, column % 2]
            styles[row // 4, column // 2] = curve.style
    return _text(codes, styles, _label(high_y, log), _label(low_y, log))


def _prepared(curve: Curve, log: bool) -> Curve:
    known = np.isfinite(curve.y) & ((curve.y > 0) | (not log))
    y = curve.y[known]
    return Curve(curve.x[known].astype(np.float64), np.log10(y) if log else y.astype(np.float64), curve.style)


def _dots(curve: Curve, x_limits: tuple[float, float], y_limits: tuple[float, float], width: int, height: int) -> np.ndarray:
    """Which dots of the grid the curve goes through, bool (height, width)."""
    (low_x, high_x), (low_y, high_y) = x_limits, y_limits
    dots = np.zeros((height, width), bool)
    columns = (curve.x - low_x) / ((high_x - low_x) or 1.0) * (width - 1)
    first, last = np.round(columns[[0, -1]]).astype(np.int64)
    at = np.arange(first, last + 1)
    y = np.interp(at, columns, curve.y)
    rows = np.round((high_y - y) / ((high_y - low_y) or 1.0) * (height - 1)).astype(np.int64)
    for place, column in enumerate(at):
        before = rows[place - 1] if place else rows[place]
        top, bottom = sorted((int(before), int(rows[place])))
        # Steep parts are filled in, so that the line does not break.
        dots[top + (before < rows[place]) : bottom + 1 - (before > rows[place]), column] = True
        dots[rows[place], column] = True
    return dots


def _text(codes: np.ndarray, styles: np.ndarray, top: str, bottom: str) -> Text:
    text = Text(end="")
    for row in range(len(codes)):
        label = top if row == 0 else bottom if row == len(codes) - 1 else ""
        text.append(label.rjust(_LABEL_WIDTH), "dim")
        text.append("┤" if label else "│", "dim")
        for code, style in zip(codes[row], styles[row], strict=True):
            text.append(chr(0x2800 + code) if code else " ", style)
        if row < len(codes) - 1:
            text.append("\n")
    return text


def _label(value: float, log: bool) -> str:
    number = 10.0**value if log else value
    return f"{number:.3g}"[:_LABEL_WIDTH]
