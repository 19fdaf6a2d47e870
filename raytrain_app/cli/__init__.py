"""The command `raytrain`: parses, calls, prints. Every error ends here, as a sentence and an exit code.

Nothing heavy is imported until a command runs, so that `raytrain --help` answers at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from raytrain_app import __version__
from raytrain_app.cli import bench as bench_commands
from raytrain_app.cli import cluster as cluster_commands
from raytrain_app.cli import data as data_commands
from raytrain_app.cli.audit import audit
from raytrain_app.cli.control import scale, status, stop
from raytrain_app.cli.drill import drill
from raytrain_app.cli.evaluate import evaluate
from raytrain_app.cli.export import export
from raytrain_app.cli.grafana import grafana
from raytrain_app.cli.init import init
from raytrain_app.cli.listing import list_runs
from raytrain_app.cli.predict import predict
from raytrain_app.cli.report import compare, report
from raytrain_app.cli.run import check, run
from raytrain_app.cli.submit import submit
from raytrain_app.cli.tensorboard import tensorboard
from raytrain_app.cli.watch import watch
from raytrain_app.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, RaytrainError, TrainingError

app = typer.Typer(
    name="raytrain",
    help="Trains PyTorch and Keras models on Ray clusters whose machines come and go.",
    epilog="Start with: raytrain init my-project && cd my-project && raytrain run job.yaml",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"raytrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train": (init, check, run, submit, scale, stop),
    "See": (status, watch, list_runs, report, compare, tensorboard, grafana),
    "Use the model": (evaluate, predict, export),
    "Prove": (audit, drill),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(_command.__name__.removesuffix("_runs"), rich_help_panel=_panel)(_command)
app.add_typer(bench_commands.app, name="bench", rich_help_panel="Prove")
app.add_typer(data_commands.app, name="data", rich_help_panel="Data and clusters")
app.add_typer(cluster_commands.app, rich_help_panel="Data and clusters")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program and ends it with the exit code of section "Exit codes" of the README.

    Args:
        arguments: the command line without the program's name; None is that of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(arguments)
    except RaytrainError as error:
        code = _explain(error, debug="--debug" in arguments)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exception as error:
        code = _explain_bug(error, debug="--debug" in arguments)
    else:
        code = EXIT_DONE
    sys.exit(code)


def _explain(error: RaytrainError, debug: bool) -> int:
    if isinstance(error, TrainingError) and error.traceback:
        typer.echo(error.traceback.rstrip("\n"), err=True)
    if debug:
        typer.echo("".join(traceback.format_exception(error)).rstrip("\n"), err=True)
    typer.echo(str(error), err=True)
    return error.exit_code


def _explain_bug(error: Exception, debug: bool) -> int:
    """An error that nobody foresaw: its own words, and how to learn more."""
    if debug:
        typer.echo("".join(traceback.format_exception(error)).rstrip("\n"), err=True)
    else:
        said = " ".join(str(error).split()) or "no message"
        typer.echo(f"Unexpected {type(error).__name__}: {said}; run again with --debug for the traceback", err=True)
    return EXIT_FAILED
