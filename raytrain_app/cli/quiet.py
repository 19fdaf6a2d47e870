"""Keeps Ray's and the libraries' own chatter off the terminal: it goes to a log file in the run directory."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from raytrain_app.errors import StorageError
from raytrain_app.storage.folder import Folder

LOG = "driver.log"


@contextmanager
def quiet_terminal(storage: str, name: str, *, debug: bool) -> Iterator[TextIO]:
    """Sends what this process and its libraries print in the block to `driver.log` in the run directory.

    File descriptors are redirected, since Ray's core and the processes it starts write to them directly. Without a run
    directory at the end (the job was refused), the log is dropped.

    Args:
        storage: URI that the run directory is or comes to be in.
        name: of the run directory.
        debug: redirect nothing.

    Yields:
        The real stderr, for the program's own words.
    """
    if debug:
        yield sys.stderr
        return
    with tempfile.TemporaryFile() as log, _redirected((1, 2), log.fileno()) as terminal:
        try:
            yield terminal
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            log.seek(0)
            _keep(storage, name, log.read())


@contextmanager
def quiet_libraries(*, debug: bool, stdout: bool = False) -> Iterator[TextIO]:
    """Drops what this process and its libraries print to stderr in the block; stdout stays the program's own.

    Args:
        debug: drop nothing.
        stdout: drop what goes to stdout too.

    Yields:
        The real stderr, for the program's own words.
    """
    if debug:
        yield sys.stderr
        return
    with open(os.devnull, "wb") as nowhere, _redirected((1, 2) if stdout else (2,), nowhere.fileno()) as terminal:
        yield terminal


@contextmanager
def _redirected(descriptors: tuple[int, ...], target: int) -> Iterator[TextIO]:
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(descriptor) for descriptor in descriptors]
    with os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace") as terminal:
        for descriptor in descriptors:
            os.dup2(target, descriptor)
        try:
            yield terminal
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, original in zip(descriptors, saved, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


def _keep(storage: str, name: str, chatter: bytes) -> None:
    # The outcome of the run matters more than its log: a storage that fails now has been reported by the run itself.
    with contextlib.suppress(StorageError):
        folder = Folder.open(storage).child(name)
        if folder.exists("job.yaml"):
            earlier = folder.read(LOG) if folder.exists(LOG) else b""
            folder.write(LOG, earlier + chatter)
