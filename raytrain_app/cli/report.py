"""`raytrain report` and `raytrain compare`: what happened in a run, and runs side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raytrain_app.cli.control import Storage, runs_here
from raytrain_app.cli.run import Debug
from raytrain_app.errors import DataError, JobError, RaytrainError

if TYPE_CHECKING:
    from raytrain_app.report.pages import Material, Report
    from raytrain_app.storage.folder import Folder

Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Runs: their directories, or their names below --storage.",
        show_default=False,
        autocompletion=runs_here,
    ),
]
RunsOrNewest = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN...",
        help="Runs: their directories, or their names below --storage. Without any: the newest there.",
        show_default=False,
        autocompletion=runs_here,
    ),
]
MOST_EVALUATED_BYTES = 256 << 20
"""Size of the test files up to which a report evaluates a run that has no evaluation yet."""


def report(
    runs: RunsOrNewest = None,
    storage: Storage = "runs",
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Where to write, instead of the run directory, or of ./comparison for several."
        ),
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate/--no-evaluate", help="Evaluate the test rows if that has not been done yet.")
    ] = True,
    debug: Debug = False,
) -> None:
    """Write a report: one HTML file that needs nothing else, and its charts as PNG files. Several runs are compared.

    Example: [bold]raytrain report runs/mnist-torch[/bold]
    """
    from raytrain_app.storage.folder import Folder

    folders = _find(runs or [None], storage)
    if len(folders) > 1:
        from raytrain_app.report.comparison import comparison_report

        made, target = comparison_report(_gather(folders)), Folder.open(out or "comparison")
    else:
        made, target = _one(folders[0], evaluate, debug), Folder.open(out) if out else folders[0]
    for name, data in made.plots.items():
        target.write(f"plots/{name}", data)
    target.write("report.html", made.html.encode())
    typer.echo(target.at("report.html"))


def compare(
    runs: Runs,
    storage: Storage = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
    debug: Debug = False,
) -> None:
    """Compare runs: results, and what differs in their jobs. `raytrain report` of several runs draws it.

    Example: [bold]raytrain compare mnist-torch mnist-bigger[/bold]
    """
    from raytrain_app.report.comparison import differences, names_of, rows, sentences

    materials = _gather(_find(runs, storage))
    if len(materials) < 2:
        raise JobError(f"compare: found one run, {runs[0]}; expected two or more, and `raytrain list` shows which there are")
    names, results, jobs = names_of(materials), rows(materials), differences(materials)
    if as_json:
        states: list[dict[str, Any]] = [material.state.to_json() for material in materials]
        typer.echo(json.dumps({"runs": states, "differences": {key: values for key, *values in jobs}}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", *names, box=None, pad_edge=False, header_style="bold")
    for row in results:
        cells = [f"[green]{cell}[/green]" if place in row.best else cell for place, cell in enumerate(row.cells)]
        table.add_row(row.label, *cells)
    if jobs:
        table.add_section()
        table.add_row("[bold]in the job[/bold]")
        for key, *values in jobs:
            table.add_row(key, *values)
    console = Console()
    console.print(table)
    for sentence in sentences(materials):
        console.print(f"\n{sentence}", highlight=False, markup=False)


def _find(runs: Sequence[str | None], storage: str) -> list[Folder]:
    from raytrain_app.storage.requests import find_run

    return [find_run(run, storage) for run in runs]


def _gather(folders: list[Folder]) -> list[Material]:
    from raytrain_app.report.comparison import MOST_RUNS
    from raytrain_app.report.pages import gather

    if len(folders) > MOST_RUNS:
        raise JobError(f"found {len(folders)} runs; expected at most {MOST_RUNS}, since more cannot be told apart")
    return [gather(folder) for folder in folders]


def _one(folder: Folder, evaluate: bool, debug: bool) -> Report:
    from raytrain_app.report.evaluations import read_evaluation
    from raytrain_app.report.pages import gather, run_report

    evaluation, reason = read_evaluation(folder), "It has not been evaluated; `raytrain evaluate` does that."
    if evaluation is None and evaluate:
        try:
            evaluation = _evaluate(folder, debug)
        except (RaytrainError, ImportError) as error:
            # The report stands without it: the machine may have neither Ray nor the data.
            reason = f"It has not been evaluated, and cannot be here: {str(error).splitlines()[0]}."
    return run_report(gather(folder, evaluation), reason)


def _evaluate(folder: Folder, debug: bool) -> dict[str, Any]:
    from raytrain_app.cli.quiet import quiet_libraries

    with quiet_libraries(debug=debug) as terminal:
        from raytrain_app.data.one_split import size_bytes
        from raytrain_app.inference.evaluations import evaluate_run
        from raytrain_app.inference.trained import load_trained

        trained = load_trained(folder)
        size = size_bytes(trained.job, trained.task, "test")
        if size > MOST_EVALUATED_BYTES:
            raise DataError(f"its test rows are {size >> 20:,} MiB; `raytrain evaluate` measures so many, if asked")
        typer.echo("evaluating the test rows", file=terminal)
        return evaluate_run(trained, folder, "test")
