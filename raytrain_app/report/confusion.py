"""The confusion matrix as a picture, and in words."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from raytrain_app.report.drawing import FONT_PT, PALETTE, blank

MOST_CLASSES, MOST_NUMBERED = 64, 20
"""Classes that a picture can show, and with the counts written into its cells."""


def confusion_figure(counts: np.ndarray, *, page: bool) -> Figure:
    """Draws the matrix: right answers in one colour, wrong ones in another that shows small shares too.

    Args:
        counts: rows of true class i that were taken for class j, shape (classes, classes).
        page: leave out background and title, which a page has itself.
    """
    classes = len(counts)
    figure, axes = blank(4.6, 4.4)
    if not page:
        figure.set_facecolor(PALETTE["page"])
        axes.set_title("Confusion matrix", loc="left", fontsize=FONT_PT + 2, color=PALETTE["ink"], fontweight="bold")
    axes.spines["bottom"].set_visible(False)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    for true, predicted in zip(*np.nonzero(counts), strict=True):
        share = float(shares[true, predicted])
        right = true == predicted
        color, strength = (PALETTE["train"], 0.75 * share) if right else (PALETTE["bad"], 0.15 + 0.85 * share**0.5)
        axes.add_patch(Rectangle((predicted - 0.47, true - 0.47), 0.94, 0.94, color=color, alpha=strength, linewidth=0))
        if classes <= MOST_NUMBERED:
            size = FONT_PT if classes <= 10 else FONT_PT - 3
            axes.text(
                predicted, true, f"{counts[true, predicted]:,}", ha="center", va="center", fontsize=size, color=PALETTE["ink"]
            )
    axes.set_xlim(-0.5, classes - 0.5)
    axes.set_ylim(classes - 0.5, -0.5)
    axes.set_aspect("equal")
    axes.xaxis.tick_top()
    ticks = range(0, classes, 1 if classes <= MOST_NUMBERED else 5)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    return figure


def confused_pairs(counts: np.ndarray, most: int = 5) -> str:
    """The classes most often taken for each other: "4 for 9 (12 rows), 7 for 2 (8)"."""
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    places = [divmod(int(place), len(counts)) for place in order]
    return ", ".join(
        f"{true} taken for {predicted} ({wrong[true, predicted]:,} of {counts[true].sum():,})"
        for true, predicted in places
        if wrong[true, predicted]
    )
