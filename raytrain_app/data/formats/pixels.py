"""Tables with one column a pixel, as CSV files and some Parquet files of MNIST have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_app.data.parts import Want


@dataclass(frozen=True)
class Layout:
    """Which columns are what, by position. There is more than one label column for a one-hot label."""

    labels: tuple[int, ...]
    pixels: tuple[int, ...]


def layout(names: Sequence[str] | None, width: int, want: Want) -> Layout | str:
    """Finds the pixels and the label among a table's columns.

    Args:
        names: the columns' names, None for a file without a header.
        width: number of columns.
        want: what the task expects.

    Returns:
        The layout, or what is wrong, as a sentence without its subject.
    """
    pixels, classes = want.row_size, want.columns.num_classes
    if want.one_hot:
        if width != pixels + classes:
            return (
                f"has {width} columns; expected {pixels + classes} with data.one_hot, {pixels} pixels and {classes} for the label"
            )
        return Layout(tuple(range(pixels, width)), tuple(range(pixels)))
    if width == pixels:
        return f"has no label column: found {width} columns, all pixels; expected {pixels + 1}, the label and {pixels} pixels"
    if width == pixels + classes and classes > 1:
        return (
            f"has {width} columns; expected {pixels + 1}, the label and {pixels} pixels. If they are {pixels} pixels and then a "
            f"one-hot label of {classes}, set data.one_hot: true"
        )
    if width != pixels + 1:
        return f"has {width} columns; expected {pixels + 1}, the label and {pixels} pixels"
    label = 0
    if names is not None:
        lowered = [name.strip().lower() for name in names]
        named = [lowered.index(name) for name in want.columns.y_names if name in lowered]
        if not named and "class" not in lowered:
            found, expected = ", ".join(names[:3]), " or ".join(want.columns.y_names)
            return f"has no label column: found columns {found}, ...; expected one named {expected}; rename it"
        label = named[0] if named else lowered.index("class")
    return Layout((label,), tuple(place for place in range(width) if place != label))
