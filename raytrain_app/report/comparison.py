"""Several runs side by side: their results, what differs in their jobs, and their curves laid over each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain_app.job import Job
from raytrain_app.report import drawing
from raytrain_app.report.charts import Run, charts_of_runs
from raytrain_app.report.pages import Material, Report, chart_part, render
from raytrain_app.report.words import duration, percent

MOST_RUNS = 8
"""Runs that a page can show in colours that are told apart."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        label: what is compared.
        cells: one a run, as text; "-" where a run has no such value.
        best: places of the best, if one of them is better than another.
    """

    label: str
    cells: list[str]
    best: list[int]


def rows(materials: Sequence[Material]) -> list[Row]:
    """What there is to compare, the results first."""
    return [row for row in _rows(materials) if any(cell != "-" for cell in row.cells)]


def differences(materials: Sequence[Material]) -> list[list[str]]:
    """Keys of the jobs that differ, each with its value in every run."""
    flat = [_flat(material.job) for material in materials]
    keys = dict.fromkeys(key for one in flat for key in one)
    texts = {key: [_text(one[key]) if key in one else "-" for one in flat] for key in keys if key != "name"}
    return [[key, *values] for key, values in texts.items() if len(set(values)) > 1]


def names_of(materials: Sequence[Material]) -> list[str]:
    """A name for each run; those that share one are told apart by their directories."""
    names = [material.state.name for material in materials]
    return [name if names.count(name) == 1 else material.state.directory for name, material in zip(names, materials, strict=True)]


def sentences(materials: Sequence[Material]) -> Iterator[str]:
    """What stands out."""
    hashes = [(material.state.result or {}).get("weights_sha256") for material in materials]
    if all(hashes) and len(set(hashes)) == 1:
        yield "All of them ended with the same weights, bit for bit."
    scored = zip((material.state.metrics.get("test_accuracy") for material in materials), names_of(materials), strict=True)
    known = sorted(((value, name) for value, name in scored if value is not None), reverse=True)
    if len(known) > 1 and known[0][0] > known[-1][0]:
        best, worst = (f"{name} with {percent(value, 2)}" for value, name in (known[0], known[-1]))
        yield f"The most accurate on test rows is {best}; the least is {worst}."


def comparison_report(materials: Sequence[Material]) -> Report:
    """The page that compares runs."""
    names = names_of(materials)
    named = [
        Run(name, material.run.history, material.run.events, material.run.clock)
        for name, material in zip(names, materials, strict=True)
    ]
    charts = charts_of_runs(named)
    html = render(
        "comparison.html.j2",
        names=names,
        summary=list(sentences(materials)),
        rows=rows(materials),
        differences=differences(materials),
        charts=[chart_part(chart) for chart in charts],
    )
    return Report(html, {f"{chart.name}.png": drawing.png(chart) for chart in charts})


# ---- rows ----


def _rows(materials: Sequence[Material]) -> Iterator[Row]:
    def row(label: str, value: Callable[[Material], Any], text: Callable[[Any], str], better: int = 0) -> Row:
        values = [value(material) for material in materials]
        cells = ["-" if v is None else text(v) for v in values]
        known = [v for v in values if v is not None]
        best = (max(known) if better > 0 else min(known)) if better and len(set(known)) > 1 else None
        return Row(label, cells, [place for place, v in enumerate(values) if best is not None and v == best])

    def metric(name: str) -> Callable[[Material], Any]:
        return lambda material: material.state.metrics.get(name)

    def result(name: str) -> Callable[[Material], Any]:
        return lambda material: (material.state.result or {}).get(name)

    yield row("status", lambda m: m.state.status, lambda v: str(v).replace("_", " "))
    for split, prefix in (("test", "test"), ("validation", "val")):
        yield row(f"{split} accuracy", metric(f"{prefix}_accuracy"), lambda v: percent(v, 2), 1)
        yield row(f"{split} loss", metric(f"{prefix}_loss"), lambda v: f"{v:.4f}", -1)
    yield row("training loss", metric("train_loss"), lambda v: f"{v:.4f}", -1)
    yield row("epochs", result("epochs"), str)
    yield row("steps", lambda m: m.state.step, lambda v: f"{v:,}")
    yield row("samples", lambda m: m.state.samples, lambda v: f"{v:,}")
    yield row("time", lambda m: m.run.clock.total_s, duration, -1)
    yield row("samples a second", lambda m: m.state.samples_per_s, lambda v: f"{v:,.0f}", 1)
    yield row("tokens a second", lambda m: m.state.tokens_per_s, lambda v: f"{v:,.0f}", 1)
    yield row("model FLOPs utilization", result("model_flops_utilization"), percent, 1)
    yield row("workers", _worker_range, str)
    yield row("disruptions", lambda m: len(m.state.disruptions), str)
    yield row("paused in all", lambda m: sum(r["paused_s"] for r in m.state.disruptions), duration)
    yield row("steps redone", lambda m: sum(r["steps_redone"] for r in m.state.disruptions), str)
    yield row("goodput", result("goodput"), percent, 1)
    yield row("weights sha256", result("weights_sha256"), lambda v: v[:12])


def _worker_range(material: Material) -> str | None:
    counts = [event["workers"] for event in material.run.events if event["kind"] == "generation"]
    if not counts:
        return None
    return str(counts[0]) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _flat(job: Job) -> dict[str, Any]:
    def walk(section: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            if isinstance(value, dict) and value:
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    return dict(walk(job.model_dump(), ""))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
