"""`raytrain data`: get a data set, look into one, or turn one into a Parquet file."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raytrain_app.errors import EXIT_WRONG_INPUT, DataError, JobError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from raytrain_app.data.inspection import Inspection, SplitSummary
    from raytrain_app.job import Data

app = typer.Typer(
    name="data",
    help="Get a data set, look into one, or turn one into a Parquet file.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_BAR = 30
_STRIP = 10


class Format(str, Enum):
    """The values of `--format`; those of `data.format`."""

    auto = "auto"
    idx = "idx"
    npz = "npz"
    csv = "csv"
    parquet = "parquet"
    images = "images"


Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="mnist-sample, mnist, fashion-mnist, a path, a glob or a URI.", show_default=False),
]
TaskName = Annotated[str, typer.Option("--task", metavar="TASK", help="The task whose columns are expected.")]
FormatName = Annotated[Format, typer.Option("--format", help="The format, where it cannot be told.")]
Classes = Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of classes, if not the task's.")]
Transpose = Annotated[bool, typer.Option("--transpose", help="Swap rows and columns of each image (EMNIST).")]
LabelOffset = Annotated[int, typer.Option(metavar="N", help="Taken away from each label (1 for EMNIST letters).")]
OneHot = Annotated[bool, typer.Option("--one-hot", help="The label is one column a class.")]
Modified = Annotated[bool, typer.Option("--allow-modified", help="Accept a well-known file with another checksum.")]
Offline = Annotated[bool, typer.Option("--offline", help="Never use the network.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.command()
def fetch(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="mnist or fashion-mnist.",
            show_default=False,
            autocompletion=lambda: ["mnist", "fashion-mnist"],
        ),
    ],
    to: Annotated[Path | None, typer.Option("--to", metavar="FOLDER", help="Where to put it, instead of the cache.")] = None,
    debug: Debug = False,
) -> None:
    """Download a well-known data set and print the folder it is in.

    What is there already is not downloaded again; what arrives is checked before it gets its name.

    Example: [bold]raytrain data fetch fashion-mnist[/bold]
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from raytrain_app.data.fetch import cache_folder, fetch_set
    from raytrain_app.data.known import KNOWN

    if name not in KNOWN:
        raise JobError(f"data fetch: {name!r} is not a data set that can be fetched; expected {' or '.join(KNOWN)}")
    sizes = {file.name: file.size for file in KNOWN[name].files}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bars: dict[str, Any] = {}

        def on_bytes(file: str, done: int) -> None:
            if file not in bars:
                bars[file] = progress.add_task(file, total=sizes[file])
            progress.update(bars[file], completed=done)

        folder = to or cache_folder() / name
        fetch_set(name, folder, on_bytes=on_bytes)
    typer.echo(str(folder))


@app.command()
def inspect(
    source: Source,
    task: TaskName = "mnist",
    format_name: FormatName = Format.auto,
    classes: Classes = None,
    transpose: Transpose = False,
    label_offset: LabelOffset = 0,
    one_hot: OneHot = False,
    allow_modified: Modified = False,
    offline: Offline = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Read a source and show what is in it and everything that is wrong with it.

    Ends with exit code 2 if there are problems.

    Example: [bold]raytrain data inspect ~/data/MNIST/raw[/bold]
    """
    from rich.console import Console

    from raytrain_app.data.inspection import inspect_data
    from raytrain_app.task import load_task

    data = _section(source, format_name, classes, transpose, label_offset, one_hot, allow_modified, offline)
    found = inspect_data(data, load_task(task))
    if as_json:
        typer.echo(json.dumps(_as_json(found), indent=2))
    else:
        _print(found, Console(highlight=False))
    if found.problems:
        raise typer.Exit(EXIT_WRONG_INPUT)


@app.command()
def convert(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="The file to write.", show_default=False)],
    task: TaskName = "mnist",
    format_name: FormatName = Format.auto,
    classes: Classes = None,
    transpose: Transpose = False,
    label_offset: LabelOffset = 0,
    one_hot: OneHot = False,
    allow_modified: Modified = False,
    offline: Offline = False,
    drop: Annotated[bool, typer.Option("--drop", help="Leave bad rows out instead of stopping at them.")] = False,
    debug: Debug = False,
) -> None:
    """Write a source to one Parquet file with the columns image, label and split, checked and ready to train on.

    Example: [bold]raytrain data convert letters/ letters.parquet --classes 26 --label-offset 1 --transpose[/bold]
    """
    from raytrain_app.data.convert import convert as convert_data
    from raytrain_app.task import load_task

    if out.suffix != ".parquet":
        raise DataError(f"found the output file {out}; expected a name that ends with .parquet")
    data = _section(source, format_name, classes, transpose, label_offset, one_hot, allow_modified, offline, drop)
    written, bad = convert_data(data, load_task(task), out)
    counts = ", ".join(f"{rows:,} {split}" for split, rows in written.items())
    typer.echo(f"{out}: {counts} rows" + (f"; {bad:,} bad rows left out" if bad else ""))


def _section(
    source: str,
    format_name: Format,
    classes: int | None,
    transpose: bool,
    label_offset: int,
    one_hot: bool,
    allow_modified: bool,
    offline: bool,
    drop: bool = False,
) -> Data:
    """The `data` section of a job that says the same as the options."""
    from raytrain_app.job import Data

    return Data(
        source=source,
        format=format_name.value,
        classes=classes,
        transpose=transpose,
        label_offset=label_offset,
        one_hot=one_hot,
        allow_modified=allow_modified,
        offline=offline,
        on_bad_row="drop" if drop else "fail",
    )


def _as_json(found: Inspection) -> dict[str, Any]:
    return {
        "source": found.source,
        "format": found.format,
        "shape": list(found.columns.shape),
        "dtype": found.columns.dtype,
        "classes": found.columns.num_classes,
        "splits": {
            name: {"rows": s.rows, "bad_rows": s.bad, "labels": s.labels.tolist(), "low": s.low, "high": s.high}
            for name, s in found.splits.items()
        },
        "duplicates": {f"{a}/{b}": count for (a, b), count in found.duplicates.items()},
        "problems": found.problems,
        "notes": found.notes,
    }


def _print(found: Inspection, console: Console) -> None:
    shape = " x ".join(map(str, found.columns.shape))
    console.print(
        f"[bold]{found.source}[/bold]  {found.format}, {shape} {found.columns.dtype}, {found.columns.num_classes} classes"
    )
    for name, summary in found.splits.items():
        bad = f", {summary.bad:,} bad" if summary.bad else ""
        values = "" if summary.low is None else f", values {summary.low:g}..{summary.high:g}"
        console.print(f"\n[bold]{name}[/bold]  {summary.rows:,} rows{bad}{values}")
        _print_labels(summary, console)
        if console.is_terminal and len(found.columns.shape) == 2 and found.columns.dtype == "uint8":
            console.print(_strip(summary.samples, console.width))
    for (a, b), count in found.duplicates.items():
        console.print(f"\nimages of {b} that are in {a} too: {count:,}")
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    if found.problems:
        console.print(f"\n[bold red]{len(found.problems)} problem{'s' if len(found.problems) > 1 else ''}[/bold red]")
        for problem in found.problems:
            console.print(f"- {problem}", markup=False, soft_wrap=True)
    else:
        console.print("\n[green]no problems[/green]")


def _print_labels(summary: SplitSummary, console: Console) -> None:
    most = max(int(summary.labels.max(initial=0)), 1)
    for label, count in enumerate(summary.labels.tolist()):
        console.print(f"{label:>5} {'█' * round(_BAR * count / most):<{_BAR}} {count:,}")


def _strip(images: np.ndarray, width: int) -> Text:
    """The first images side by side, two rows of pixels to a line of text; every second pixel where the terminal is narrow."""
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    step = 1 if images.shape[2] * _STRIP <= width else 2
    images = images[: max(1, width * step // max(images.shape[2], 1)), ::step, ::step]
    if images.shape[1] % 2:
        images = images[:, :-1]
    picture = images.swapaxes(0, 1).reshape(images.shape[1], -1) if len(images) else images.reshape(0, 0)
    text = Text()
    for upper, lower in zip(picture[::2].tolist(), picture[1::2].tolist(), strict=True):
        for a, b in zip(upper, lower, strict=True):
            text.append("▀", Style(color=Color.from_rgb(a, a, a), bgcolor=Color.from_rgb(b, b, b)))
        text.append("\n")
    return text
