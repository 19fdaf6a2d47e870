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
def quiet_terminal(run_directory: str, *, debug: bool) -> Iterator[TextIO]:
    """Sends what this process and its libraries print in the block to `driver.log` in the run directory.

    File descriptors are redirected, since Ray's core and the processes it starts write to them directly. Without a run
    directory at the end (the job was refused), the log is dropped.

    Args:
        run_directory: URI of the run directory, which may come to be in the block.
        debug: redirect nothing.

    Yields:
        The real stderr, for the program's own words.
    """
    if debug:
        yield sys.stderr
        return
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as log, os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace") as terminal:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield terminal
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
            log.seek(0)
            _keep(run_directory, log.read())


def _keep(run_directory: str, chatter: bytes) -> None:
    # The outcome of the run matters more than its log: a storage that fails now has been reported by the run itself.
    with contextlib.suppress(StorageError):
        folder = Folder.open(run_directory)
        if folder.exists("job.yaml"):
            earlier = folder.read(LOG) if folder.exists(LOG) else b""
            folder.write(LOG, earlier + chatter)
