"""`raytrain bench`: the product beside what people have today, measured in one run, with ratios."""

from __future__ import annotations

import logging
from enum import Enum
from typing import Annotated

import typer

app = typer.Typer(help="Measure the product beside what people have today, in one run.", no_args_is_help=True)


class Disturbance(str, Enum):
    """What `bench elastic` can measure on its own."""

    KILL = "kill"
    LEAVE = "leave"
    NODE = "node"
    ALL = "all"
    HANG = "hang"


@app.command()
def elastic(
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each event.")] = 10,
    only: Annotated[list[Disturbance] | None, typer.Option(help="Measure this alone; may be given several times.")] = None,
    stock: Annotated[int, typer.Option(min=0, help="Repeats with stock Ray Train, which needs a minute for each.")] = 1,
) -> None:
    """Measure what lost, added and planned changes of workers and nodes cost.

    Example: [bold]raytrain bench elastic --only kill --only leave --stock 0[/bold]
    """
    from raytrain_app.bench.elastic import lines, measure_product, measure_stock

    def tell(text: str) -> None:
        typer.echo(text, err=True)

    chosen = [disturbance.value for disturbance in only or Disturbance]
    product = measure_product(repeats, chosen, tell)
    for line in lines(product, measure_stock(stock, chosen, tell)):
        typer.echo(line)


@app.command()
def ingest(
    source: Annotated[str, typer.Argument(help="Images to read: a known name, a path or a URI.")] = "mnist-sample",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, interleaved; figures are medians.")] = 5,
) -> None:
    """Measure how fast rows reach a linear model: our reader, stock Ray Data, and a tensor in memory.

    Example: [bold]raytrain bench ingest /usr/share/datasets/fashion-mnist[/bold]
    """
    from raytrain_app.bench.ingest import measure_ingest
    from raytrain_app.job import job_from_dict
    from raytrain_app.session import ray_session
    from raytrain_app.task import load_task

    raw = {"name": "bench-ingest", "task": "mnist", "model": {"name": "linear"}, "data": {"source": source}}
    with ray_session(None):
        for line in measure_ingest(job_from_dict(raw), load_task("mnist"), rounds).lines():
            typer.echo(line)


@app.command()
def ps(
    speed: Annotated[bool, typer.Option(help="Measure how fast gradients and parameters move.")] = True,
    accuracy: Annotated[bool, typer.Option(help="Measure the time to an accuracy with a slow worker.")] = True,
    corrections: Annotated[bool, typer.Option(help="Compare modes and corrections; it takes some minutes.")] = False,
) -> None:
    """Measure the parameter servers beside the server that most people write first, beside all-reduce, and among themselves.

    Example: [bold]raytrain bench ps --no-accuracy[/bold]
    """
    import ray

    from raytrain_app.bench.ps import measure
    from raytrain_app.bench.ps_accuracy import WORKERS, measure_accuracy
    from raytrain_app.bench.ps_corrections import compare

    def tell(text: str) -> None:
        typer.echo(text, err=True)

    ray.init(address="local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    if speed:
        figures = measure(tell)
        for line in (*(line.text() for line in figures.lines), *figures.targets()):
            typer.echo(line)
    if accuracy:
        for text in measure_accuracy(tell).lines():
            typer.echo(text)
    if corrections:
        for text in compare(tell).lines():
            typer.echo(text)
    ray.shutdown()
