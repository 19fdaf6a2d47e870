"""Whoever else is told of a run while it trains: Ray's metrics, and experiment trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from raytrain_app.job import Job
from raytrain_app.report.updates import Update

Tell = Callable[[Update], None]


@contextmanager
def listening(job: Job, directory: str, tell: Tell) -> Iterator[Tell]:
    """Passes updates on to `tell` and to all listeners that the job asks for, until the block ends. Ray is up.

    Args:
        job: what is trained.
        directory: URI of the run directory.
        tell: the one that is told first.
    """
    from raytrain_app.report.metrics import RunMetrics
    from raytrain_app.report.trackers import Tracking

    with ExitStack() as stack:
        metrics = RunMetrics(job.name)
        trackers = [stack.enter_context(Tracking(name, job, directory, tell)) for name in job.trackers]

        def tell_all(update: Update) -> None:
            tell(update)
            metrics.take(update)
            for tracker in trackers:
                tracker.take(update)

        yield tell_all
