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
    from raytrain_app.cli.quiet import quiet_libraries

    chosen = [disturbance.value for disturbance in only or Disturbance]
    with quiet_libraries(debug=False, stdout=True) as terminal:  # Ray says at length that nodes are gone

        def tell(text: str) -> None:
            typer.echo(text, file=terminal)
            terminal.flush()

        product = measure_product(repeats, chosen, tell)
        found = lines(product, measure_stock(stock, chosen, tell))
    for line in found:
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
    from raytrain_app.cli.quiet import quiet_libraries
    from raytrain_app.job import job_from_dict
    from raytrain_app.session import ray_session
    from raytrain_app.task import load_task

    raw = {"name": "bench-ingest", "task": "mnist", "model": {"name": "linear"}, "data": {"source": source}}
    with quiet_libraries(debug=False), ray_session(None):
        figures = measure_ingest(job_from_dict(raw), load_task("mnist"), rounds)
    for line in figures.lines():
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


@app.command()
def step(
    framework: Annotated[str, typer.Option(help="torch or tensorflow.")] = "torch",
    model: Annotated[str, typer.Option(help="A model of the task mnist: linear, mlp or cnn.")] = "cnn",
    workers: Annotated[int, typer.Option(min=1, help="Processes of each kind; with one, the plain script is a bare loop.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Global batch.")] = 64,
    shards: Annotated[int | None, typer.Option(min=1, help="Virtual shards; by default one a worker.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Intra-op threads a process.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    cuda_graphs: Annotated[bool, typer.Option("--cuda-graphs", help="With cuda: train.cuda_graphs for the exact step.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps that a kind takes at a time.")] = 25,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, interleaved; figures are medians.")] = 15,
    sizes: Annotated[bool, typer.Option("--sizes", help="Models from 8 thousand to 25 million parameters instead.")] = False,
    strategy: Annotated[str, typer.Option(help="allreduce, or model_parallel with the task tiny_gpt.")] = "allreduce",
    fsdp: Annotated[int | None, typer.Option(min=1, help="Parts that it cuts the model into; 2 if not by --tensor.")] = None,
    tensor: Annotated[int, typer.Option(min=1, help="Workers that share out its linear layers.")] = 1,
) -> None:
    """Measure seconds a step: exact, fast, and a plain script.

    That is DistributedDataParallel, or `fit` of tf_keras under MultiWorkerMirroredStrategy; for model_parallel, FSDP2 and
    tensor parallelism.

    Example: [bold]raytrain bench step --model mlp --steps 200[/bold]
    """
    from raytrain_app.bench.step import PLAIN, SIZES, Setting, measure
    from raytrain_app.errors import JobError

    if strategy not in ("allreduce", "model_parallel"):
        raise JobError(f"--strategy: {strategy!r} is neither allreduce nor model_parallel")
    if strategy == "model_parallel":
        from raytrain_app.bench.parts import PartsSetting, measure_parts

        fsdp = fsdp or (2 if tensor == 1 else 1)
        parts = PartsSetting(fsdp, tensor, batch, threads, device, steps, rounds)
        for text in measure_parts(parts, lambda text: typer.echo(text, err=True)):
            typer.echo(text)
        return
    if framework not in PLAIN:
        raise JobError(f"--framework: {framework!r} is none of {', '.join(PLAIN)}")
    for name, options in SIZES if sizes else [(model, {})]:
        shape = framework, name, options, batch, workers, shards or workers
        setting = Setting(*shape, threads, device, steps, rounds, cuda_graphs)
        for line in measure(setting, lambda text: typer.echo(text, err=True)).lines():
            typer.echo(line)


@app.command()
def start(
    repeats: Annotated[int, typer.Option(min=1, help="Repeats; figures are medians.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Workers of the job.")] = 2,
    address: Annotated[str | None, typer.Option(metavar="ADDRESS", help="A running Ray cluster on this machine.")] = None,
    stock: Annotated[bool, typer.Option(help="Measure stock Ray Train too.")] = True,
) -> None:
    """Measure the time from the command to the first step, beside that of stock Ray Train on the same job.

    Example: [bold]raytrain bench start --repeats 5[/bold]
    """
    from raytrain_app.bench.start import measure_start

    for line in measure_start(repeats, workers, address, stock, lambda text: typer.echo(text, err=True)).lines():
        typer.echo(line)


@app.command()
def checkpoint(
    checkpoints: Annotated[int, typer.Option(min=1, help="Checkpoints that are measured.")] = 6,
    workers: Annotated[int, typer.Option(min=1, help="Workers of the job.")] = 2,
    stock: Annotated[bool, typer.Option(help="Measure stock Ray Train too.")] = True,
) -> None:
    """Measure how long a checkpoint holds training, beside stock Ray Train.

    Example: [bold]raytrain bench checkpoint --checkpoints 10[/bold]
    """
    from raytrain_app.bench.checkpoint import measure_checkpoint

    for line in measure_checkpoint(checkpoints, workers, stock, lambda text: typer.echo(text, err=True)).lines():
        typer.echo(line)


@app.command()
def page(
    only: Annotated[
        list[str] | None, typer.Option(metavar="COMMAND", help="Run these only, such as step. Can be repeated.")
    ] = None,
) -> None:
    """Run all benchmarks and print a page with them, which takes about half an hour.

    Example: [bold]raytrain bench page > benchmarks.md[/bold]
    """
    from raytrain_app.bench.page import make_page

    for part in make_page(lambda text: typer.echo(text, err=True), only or ()):
        typer.echo(part)  # at once: a page that is interrupted has what was measured
