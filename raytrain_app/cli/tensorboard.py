"""`raytrain tensorboard`: TensorBoard on a run, or on all runs of a storage."""

from __future__ import annotations

import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raytrain_app.cli.control import runs_here
from raytrain_app.cli.run import Debug
from raytrain_app.errors import RaytrainError, StorageError

if TYPE_CHECKING:
    from raytrain_app.storage.folder import Folder

COPY_EVERY_S = 10.0
"""How often the files of an object store are looked at, since TensorBoard itself reads disks only."""


def tensorboard(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run, by its directory or its name below ./runs, or a folder of runs.",
            autocompletion=runs_here,
        ),
    ] = "runs",
    port: Annotated[int, typer.Option(help="Where to listen; 0 is any free port.")] = 6006,
    host: Annotated[str, typer.Option(help="On which address; 0.0.0.0 is reachable from other machines.")] = "localhost",
    debug: Debug = False,
) -> None:
    """Start TensorBoard: scalars, workers, example images and the model's graph. Ctrl-C ends it.

    Example: [bold]raytrain tensorboard runs[/bold]
    """
    from tensorboard.program import TensorBoard, TensorBoardServerException

    from raytrain_app.cli.quiet import quiet_libraries

    folder = _find(run)
    if folder.exists("job.yaml"):
        _preview(folder, debug)
    with ExitStack() as stack:
        path = folder.local_path
        if path is None:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raytrain-")))
            _copy_until_closed(folder, path, stack)
        board = TensorBoard()
        board.configure(argv=["raytrain", "--logdir", str(path), "--host", host, "--port", str(port)])
        try:
            with quiet_libraries(debug=debug):
                url = board.launch()
        except TensorBoardServerException as error:
            raise StorageError(f"TensorBoard cannot listen on {host}:{port}: {error}; choose another --port") from None
        typer.echo(f"TensorBoard shows {folder.at('')} at {url} until Ctrl-C")
        threading.Event().wait()


def _find(run: str) -> Folder:
    from raytrain_app.storage.folder import Folder
    from raytrain_app.storage.requests import find_run

    try:
        return find_run(run)
    except StorageError:
        folder = Folder.open(run)
        if not any(folder.child(name).exists("job.yaml") for name in folder.list()):
            raise
        return folder


def _preview(folder: Folder, debug: bool) -> None:
    """Adds images and graph, once. TensorBoard is of use without them, where there is no checkpoint yet or no data here."""
    from raytrain_app.cli.quiet import quiet_libraries

    with quiet_libraries(debug=debug) as terminal:
        from raytrain_app.inference.preview import FILE, write_preview
        from raytrain_app.inference.trained import load_trained

        if not folder.exists(FILE):
            try:
                if without := write_preview(load_trained(folder, on_cpu=True), folder):
                    typer.echo(f"without the graph: {without}", file=terminal)
            except RaytrainError as error:
                typer.echo(f"without example images and graph: {error}", file=terminal)


def _copy_until_closed(folder: Folder, path: Path, stack: ExitStack) -> None:
    """Keeps a copy of the event files on this machine."""
    closed = threading.Event()
    sizes: dict[str, int] = {}

    def copy() -> None:
        for name, size in folder.files().items():
            if "tfevents" in name and sizes.get(name) != size:
                target = path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(folder.read(name))
                sizes[name] = size

    def copy_on() -> None:
        while not closed.wait(COPY_EVERY_S):
            copy()

    copy()
    threading.Thread(target=copy_on, name="copy", daemon=True).start()
    stack.callback(closed.set)
