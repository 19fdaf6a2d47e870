"""Charts as PNG files, and as SVG that lives in a page: its colours are the page's own, in light and dark.

Both are drawn by matplotlib from the same value, so they cannot disagree. In the SVG each colour of the palette becomes a
CSS variable of the same role.
"""

from __future__ import annotations

import io
import json
import re
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from raytrain_app.report.charts import Chart, Series

PALETTE = {
    "ink": "#1d2127",
    "soft": "#6b7280",
    "line": "#e3e5e8",
    "page": "#ffffff",
    "train": "#2563c9",
    "validation": "#d2691e",
    "speed": "#0f8a7e",
    "good": "#2e8b3d",
    "warn": "#b7791f",
    "bad": "#c0392b",
    "run0": "#2563ca",
    "run1": "#d2691f",
    "run2": "#0f8a7f",
    "run3": "#8e44ad",
    "run4": "#c0392c",
    "run5": "#7a8b00",
    "run6": "#c2408f",
    "run7": "#5b6b7b",
}
"""Colours by role, as the light page has them; no two are equal, since a page finds the role by the colour."""

WIDTH_IN, HEIGHT_IN = 4.6, 2.7
FONT_PT = 9.5
TICK_STEPS = [1, 2, 2.5, 5, 10]
"""Distances of numbers on an axis that are easy to read, up to a power of ten."""
MOST_LINES = 20
"""Marks that are drawn as lines through the chart; of more, only the ends are."""


def png(chart: Chart, dots_per_inch: int = 160) -> bytes:
    """The chart as a PNG file."""
    figure, _ = _draw(chart, titled=True)
    return save_png(figure, dots_per_inch)


def svg(chart: Chart) -> str:
    """The chart as an `<svg>` element, with what a page needs to show values under the pointer."""
    figure, axes = _draw(chart, titled=False)
    return save_svg(figure, chart.title, _hover(chart, figure, axes))


def save_png(figure: Figure, dots_per_inch: int = 160) -> bytes:
    """A matplotlib figure as a PNG file."""
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(file, dpi=dots_per_inch, format="png")
    return file.getvalue()


def save_svg(figure: Figure, title: str, hover: dict[str, Any] | None = None) -> str:
    """A matplotlib figure as an `<svg>` element whose colours are CSS variables.

    Args:
        figure: drawn in colours of `PALETTE` only.
        title: its name for those who cannot see it.
        hover: goes into the attribute `data-hover` as JSON.
    """
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        FigureCanvasSVG(figure).print_figure(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None
    data = f" data-hover='{_attribute(json.dumps(hover, separators=(',', ':')))}'" if hover else ""
    text = (
        f'<svg {size[0]} role="img" aria-label="{_attribute(title)}" xmlns:xlink="http://www.w3.org/1999/xlink"{data}>'
        + (text[text.index(">") + 1 :])
    )
    for role, color in PALETTE.items():
        text = text.replace(color, f"var(--{role})")
    return re.sub(r">\s+<", "><", text).strip()


def blank(width_in: float, height_in: float) -> tuple[Figure, Axes]:
    """A figure with one set of axes in the report's style."""
    figure = Figure(figsize=(width_in, height_in), facecolor="none", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.03)  # type: ignore[union-attr, call-arg]
    axes = figure.add_subplot(facecolor="none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(PALETTE["line"])
    axes.tick_params(length=0, labelsize=FONT_PT, labelcolor=PALETTE["soft"])
    return figure, axes


def _draw(chart: Chart, titled: bool) -> tuple[Figure, Axes]:
    figure, axes = blank(WIDTH_IN, HEIGHT_IN)
    if titled:
        figure.set_facecolor(PALETTE["page"])
        axes.set_title(chart.title, loc="left", fontsize=FONT_PT + 2, color=PALETTE["ink"], fontweight="bold")
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=PALETTE["line"], linewidth=0.8)
    axes.set_xlabel(chart.x_label, fontsize=FONT_PT, color=PALETTE["soft"], loc="right")
    for series in chart.series:
        _draw_series(axes, series)
    _limits(axes, chart)
    for mark in chart.marks:
        if len(chart.marks) <= MOST_LINES:
            axes.axvline(mark.x, color=PALETTE[mark.color], linewidth=1, alpha=0.55, zorder=1.5)
        axes.plot([mark.x], [0], marker="^", markersize=5, color=PALETTE[mark.color], clip_on=False, linestyle="none")
    labelled = [series for series in chart.series if series.label and len(series.x)]
    if len(labelled) > 1:
        axes.legend(loc="best", fontsize=FONT_PT, frameon=False, labelcolor=PALETTE["ink"], handlelength=1.2, borderaxespad=0.2)
    return figure, axes


def _draw_series(axes: Axes, series: Series) -> None:
    color = PALETTE[series.color]
    label = series.label or "_nolegend_"
    if series.kind == "faint":
        axes.plot(series.x, series.y, color=color, linewidth=0.7, alpha=0.22, label=label)
    elif series.kind == "dots":
        few = len(series.x) <= 60
        axes.plot(series.x, series.y, color=color, linewidth=series.width, marker="o" if few else "", markersize=3.5, label=label)
    elif series.kind == "steps":
        axes.plot(series.x, series.y, color=color, linewidth=series.width, drawstyle="steps-post", label=label)
        axes.fill_between(series.x, series.y, step="post", color=color, alpha=0.12, linewidth=0)
    else:
        axes.plot(series.x, series.y, color=color, linewidth=series.width, label=label, solid_joinstyle="round")
        if series.kind == "area":
            axes.fill_between(series.x, series.y, color=color, alpha=0.12, linewidth=0)


def _limits(axes: Axes, chart: Chart) -> None:
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=TICK_STEPS, integer=chart.x_label == "step"))
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    if chart.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", length=0)
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        return
    bold = [series.y[np.isfinite(series.y)] for series in chart.series if series.kind != "faint"]
    values = np.concatenate(bold) if bold else np.empty(0)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=TICK_STEPS, integer=chart.whole))
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    if len(values):
        low = 0.0 if chart.from_zero else float(values.min())
        high = float(values.max())
        room = (high - low or abs(high) or 1.0) * 0.08
        axes.set_ylim(low if chart.from_zero else low - room, high + room)


def _short(value: float, place: int | None = None) -> str:
    """A number as short as it can be on an axis: 2k, 0.05, 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _hover(chart: Chart, figure: Figure, axes: Axes) -> dict[str, Any]:
    """What a page needs to show values: where the axes are in the SVG, their limits, and the points."""
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()  # lays it out
    box = axes.get_position()
    points = 72.0
    width, height = figure.get_size_inches()
    return {
        "box": [round(v, 1) for v in (box.x0 * width * points, box.x1 * width * points)]
        + [round(v, 1) for v in ((1 - box.y1) * height * points, (1 - box.y0) * height * points)],
        "x": [float(v) for v in axes.get_xlim()],
        "xLabel": chart.x_label,
        "series": [
            {
                "label": series.label,
                "color": series.color,
                "steps": series.kind == "steps",
                "x": [_rounded(v) for v in series.x.tolist()],
                "y": [_rounded(v) for v in series.y.tolist()],
            }
            for series in chart.series
            if series.label and len(series.x)
        ],
        "marks": [{"x": _rounded(mark.x), "label": mark.label, "color": mark.color} for mark in chart.marks],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}") if abs(value) < 1e5 else float(f"{value:.9g}")


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("'", "&#39;").replace('"', "&quot;")
