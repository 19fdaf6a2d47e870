"""A run of the product in a thread, with its steps and events as they come, and a Ray for it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ray

from raytrain_app import runner
from raytrain_app.errors import Interrupted
from raytrain_app.job import Job
from raytrain_app.report.updates import Update
from raytrain_app.session import NAMESPACE
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.requests import Request, Requests

WAIT_S = 120.0


class Step(NamedTuple):
    """A step that was applied, when by the leading worker's clock, and by how many workers."""

    step: int
    time_s: float
    workers: int


@contextlib.contextmanager
def own_ray(num_cpus: int) -> Iterator[None]:
    """A Ray of this machine for the block, which says nothing."""
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


class WatchedRun:
    """See the module.

    Args:
        job: what to train; Ray is up.

    Attributes:
        steps: all so far.
        events: records of all so far.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.steps: list[Step] = []
        self.events: list[dict[str, Any]] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Waits for something to be true and returns it.

        Raises:
            TimeoutError: it did not come true in time.
            BaseException: what the run ended with.
        """
        deadline_s = time.monotonic() + WAIT_S
        while not (found := condition()):
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what} did not happen within {WAIT_S:g} s")
            time.sleep(0.02)
        return found

    def ask(self, request: Request) -> None:
        """Posts a request to the run."""
        Requests(Folder.open(self.job.storage).child(self.job.name)).post(request)

    def stop(self) -> None:
        """Ends the run."""
        self.ask(Request(kind="stop"))
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        try:
            with contextlib.suppress(Interrupted):  # as asked
                runner.run(self.job, on_update=self._watch)
        except BaseException as error:
            self._error = error

    def _watch(self, update: Update) -> None:
        if update.kind == "step":
            self.steps.append(Step(update.record["step"], update.record["time"], update.record["workers"]))
        elif update.kind == "event":
            self.events.append(dict(update.record))
