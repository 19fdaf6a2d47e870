"""The report as one HTML file that needs nothing else, and its charts as PNG files. Made from the run directory alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from raytrain_app import __version__
from raytrain_app.errors import StorageError
from raytrain_app.job import Job
from raytrain_app.report import drawing
from raytrain_app.report.charts import Chart, Run, charts_of
from raytrain_app.report.confusion import MOST_CLASSES, confused_pairs, confusion_figure
from raytrain_app.report.happenings import CAUSES
from raytrain_app.report.history import RunClock, read_history
from raytrain_app.report.state import RunState, read_state
from raytrain_app.report.words import counted, duration, moment, percent
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.rundir import RunDirectory

MOST_ROWS = 200
"""Events and disruptions that a page lists."""
MEANINGS = {
    "useful": "steps that counted",
    "redone": "work thrown away and done again",
    "starting": "from the worker's start to its first step",
    "idle": "waiting for others",
}

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Material:
    """All that is known of a run.

    Attributes:
        evaluation: content of the newest evaluation, None where the run was not evaluated.
        data_sha256: hash of the data set, None where no data was read.
    """

    job: Job
    state: RunState
    run: Run
    evaluation: Record | None
    data_sha256: str | None


@dataclass(frozen=True)
class Report:
    """A page and its pictures.

    Attributes:
        html: the page.
        plots: PNG files by name.
    """

    html: str
    plots: dict[str, bytes]


def gather(folder: Folder, evaluation: Record | None = None) -> Material:
    """Reads a run directory.

    Raises:
        StorageError, JobError: there is no run, or something in it cannot be read.
    """
    directory = RunDirectory(folder)
    job, state, history, events = directory.read_job(), read_state(folder), read_history(directory), directory.read_events()
    clock = RunClock.of(events, history.steps["time"])
    return Material(job, state, Run(job.name, history, events, clock), evaluation, directory.read_data_sha256())


def run_report(material: Material, no_evaluation: str = "") -> Report:
    """The report of one run.

    Args:
        material: of the run.
        no_evaluation: why there is no evaluation, if there is none.
    """
    charts = charts_of(material.run)
    plots = {f"{chart.name}.png": drawing.png(chart) for chart in charts}
    evaluation = None
    if material.evaluation is not None:
        evaluation = _evaluation(material.evaluation)
        counts = _confusion(material.evaluation)
        if counts is not None:
            plots["confusion.png"] = drawing.save_png(confusion_figure(counts, page=False))
    disruptions = sorted(material.state.disruptions, key=lambda receipt: -receipt["paused_s"])[:MOST_ROWS]
    html = render(
        "run.html.j2",
        run={**vars(material.state), "model": material.job.model.name},
        summary=list(_sentences(material)),
        tiles=list(_tiles(material)),
        charts=[chart_part(chart) for chart in charts],
        spent=list(_spent(material.state.worker_seconds)),
        disruptions=[_disruption(receipt, material.run.clock) for receipt in sorted(disruptions, key=lambda r: r["time"])],
        disruptions_left_out=len(disruptions) < len(material.state.disruptions),
        disruptions_total=len(material.state.disruptions),
        evaluation=evaluation,
        no_evaluation=no_evaluation,
        facts=list(_facts(material)),
        job=material.job.to_yaml(),
        events=[_event(event, material.run.clock) for event in material.run.events[-MOST_ROWS:]],
        events_total=len(material.run.events),
    )
    return Report(html, plots)


def render(template: str, **values: Any) -> str:
    """Fills one of the templates in `page/`."""
    environment = Environment(
        loader=PackageLoader("raytrain_app.report", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(version=__version__, written=moment(time.time()), **values)


def chart_part(chart: Chart) -> dict[str, Any]:
    """A chart as the templates take it."""
    unit = "" if chart.y_label.lower() in chart.title.lower() or chart.name == "workers" else chart.y_label
    return {"title": chart.title, "unit": unit, "svg": drawing.svg(chart), "marks": bool(chart.marks)}


# ---- words and tables ----


def _sentences(material: Material) -> Iterator[str]:
    state, result = material.state, material.state.result
    counts = [int(event["workers"]) for event in material.run.events if event["kind"] == "generation"]
    workers = ""
    if counts:
        low, high = min(counts), max(counts)
        workers = f" on {counted(high, 'worker')}" if low == high else f" on {low} to {high} workers"
    running = duration(material.run.clock.total_s)
    epochs = f"{counted(result['epochs'], 'epoch')}, " if result and "epochs" in result else ""
    yield f"{epochs}{counted(state.step, 'step')} and {counted(state.samples, 'sample')} in {running}{workers}."
    if state.disruptions:
        pause_s = sum(receipt["paused_s"] for receipt in state.disruptions)
        redone = sum(receipt["steps_redone"] for receipt in state.disruptions)
        yield (
            f"{counted(len(state.disruptions), 'disruption').capitalize()} paused it for {duration(pause_s)} in all; "
            f"{counted(redone, 'step')} {'was' if redone == 1 else 'were'} redone."
        )
    if result and result.get("goodput") is not None:
        yield f"{percent(result['goodput'])} of the worker-seconds went into steps that counted."
    if not state.ended:
        yield "It has not ended: this is how far it was when the page was written."


def _tiles(material: Material) -> Iterator[tuple[str, str, str]]:
    state, metrics = material.state, material.state.metrics
    scored = [(split, prefix) for split, prefix in (("Test", "test"), ("Validation", "val")) if f"{prefix}_loss" in metrics]
    for split, prefix in scored:
        yield f"{split} accuracy", percent(metrics[f"{prefix}_accuracy"], 2), f"loss {metrics[f'{prefix}_loss']:.4g}"
    if not scored and "loss" in metrics:
        yield "Training loss", f"{metrics['loss']:.4g}", f"accuracy {percent(metrics['accuracy'])}"
    if state.samples_per_s is not None:
        yield "Throughput", f"{state.samples_per_s:,.0f}", "samples a second" + (", start included" if state.ended else "")
    if state.tokens_per_s is not None:
        yield "Tokens", f"{state.tokens_per_s:,.0f}", "a second"
    result = state.result or {}
    if result.get("model_flops_utilization") is not None:
        yield "Utilization", percent(result["model_flops_utilization"]), "of the devices' peak, by the model's operations"
    if result.get("goodput") is not None:
        yield "Goodput", percent(result["goodput"]), "of worker-seconds"
    if "staleness" in (steps := material.run.history.steps):
        missed = steps["staleness"][np.isfinite(steps["staleness"])]
        yield "Staleness", f"{np.median(missed):g}", f"updates missed, at most {missed.max():g}"
    yield "Disruptions", f"{len(state.disruptions):,}", _pauses(state.disruptions)
    yield "Time", duration(material.run.clock.total_s), "from start to end" if state.ended else "up to now"


def _pauses(disruptions: Sequence[Record]) -> str:
    return f"longest {duration(max(receipt['paused_s'] for receipt in disruptions))}" if disruptions else "no pause"


def _spent(seconds: Mapping[str, float]) -> Iterator[dict[str, str]]:
    total_s = sum(max(0.0, spent_s) for spent_s in seconds.values())
    if total_s > 0:
        for name, spent_s in seconds.items():
            share = max(0.0, spent_s) / total_s
            yield {
                "name": name,
                "weight": f"{share:.5f}",
                "share": percent(share),
                "seconds": duration(max(0.0, spent_s)),
                "meaning": MEANINGS.get(name, ""),
            }


def _disruption(receipt: Record, clock: RunClock) -> list[str]:
    at_s = float(clock.seconds([receipt["time"]])[0])
    spent = receipt["worker_seconds"]
    return [
        duration(at_s),
        str(CAUSES.get(receipt["cause"], receipt["cause"])),
        f"{receipt['workers_before']} → {receipt['workers_after']}",
        duration(receipt["detected_s"]),
        duration(receipt["paused_s"]),
        f"{receipt['steps_redone']:,}",
        f"{spent.get('redone', 0.0):.2f}, {spent.get('idle', 0.0):.2f}",
    ]


def _facts(material: Material) -> Iterator[tuple[str, str]]:
    state, events = material.state, material.run.events
    result = state.result or {}
    if state.started is not None:
        yield "started", f"{moment(state.started)} UTC"
    starts = [event for event in events if event["kind"] == "start"]
    if starts:
        yield "versions", f"raytrain {starts[-1].get('version')}, Ray {starts[-1].get('ray')}"
    for kind in result.get("computes_on") or []:
        yield "computed on", ", ".join(f"{name} {value}" for name, value in kind.items())
    if len(starts) > 1:
        yield "resumed", counted(len(starts) - 1, "time")
    if material.data_sha256:
        yield "data sha256", material.data_sha256
    if result.get("weights_sha256"):
        yield "weights sha256", result["weights_sha256"]
    if result.get("checkpoint"):
        yield "best checkpoint", result["checkpoint"]
    yield "run directory", state.directory


def _event(event: Record, clock: RunClock) -> list[str]:
    details = {name: value for name, value in event.items() if name not in ("kind", "time", "receipt", "computes_on")}
    if event["kind"] == "disruption":
        details = {"cause": event["receipt"]["cause"], "paused_s": event["receipt"]["paused_s"]}
    text = ", ".join(f"{name} {value}" for name, value in details.items() if value is not None)
    return [duration(float(clock.seconds([event["time"]])[0])), str(event["kind"]).replace("_", " "), text]


def _confusion(evaluation: Record) -> np.ndarray | None:
    counts = evaluation.get("confusion")
    return None if counts is None or len(counts) > MOST_CLASSES else np.array(counts, np.int64)


def _evaluation(evaluation: Record) -> dict[str, Any]:
    """An evaluation as the template takes it."""
    counts = _confusion(evaluation)
    try:
        wrong = evaluation["rows"] - evaluation["correct"]
        return {
            "sentence": (
                f"{evaluation['checkpoint']} on the {evaluation['rows']:,} {evaluation['split']} rows of {evaluation['source']}: "
                f"accuracy {percent(evaluation['accuracy'], 2)}, {wrong:,} wrong; loss {evaluation['loss']:.4g}."
            ),
            "confusion": None if counts is None else drawing.save_svg(confusion_figure(counts, page=True), "Confusion matrix"),
            "pairs": "" if counts is None else confused_pairs(counts),
            "classes": [
                [row["label"], f"{row['rows']:,}", *(_share(row[name]) for name in ("precision", "recall", "f1"))]
                for row in (evaluation.get("classes") or [])[:MOST_ROWS]
            ],
            "mistakes": [
                {**mistake, "said": f"{percent(mistake['probability'])} sure"} for mistake in evaluation.get("mistakes") or []
            ],
        }
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"the run's evaluation is not what `raytrain evaluate` writes ({type(error).__name__}: {error}); evaluate it again"
        ) from None


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value)
