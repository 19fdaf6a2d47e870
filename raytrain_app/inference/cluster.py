"""Evaluation by many workers: Ray Data hands out batches, and starts another worker where one is lost."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray

from raytrain_app.data import Reader, Split
from raytrain_app.errors import RaytrainError, TrainingError
from raytrain_app.inference.evaluation import Batch, Scored, batches, score
from raytrain_app.inference.trained import Trained, load_trained
from raytrain_app.job import Job
from raytrain_app.job.model import Workers
from raytrain_app.storage.folder import Folder
from raytrain_app.supervisor import wait_for_capacity

GROUP = 16
"""Batches that a worker is handed at a time."""


class Scorer:
    """A worker: builds the model from the run directory once, then scores the batches it is handed."""

    def __init__(self, directory: str, checkpoint: str, split: list[Any], num_shards: int) -> None:
        self._trained = load_trained(Folder.open(directory), checkpoint)
        self._split: Split = ray.get(split[0])
        self._reader = Reader(self._split.blocks)
        self._batches = batches(len(self._split), num_shards)

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, Any]:
        groups = rows["id"].tolist()
        done = [pickle.dumps([self._score(batch) for batch in self._batches[g * GROUP : (g + 1) * GROUP]]) for g in groups]
        return {"id": rows["id"], "scored": np.array(done, object)}

    def _score(self, batch: Batch) -> Scored:
        x, y = self._reader.rows(self._split.ids[batch.start : batch.stop])
        return score(self._trained, x, y, batch.start)


def score_on_cluster(
    trained: Trained, directory: str, split: Split, workers: int, tell: Callable[[int], None] = lambda done: None
) -> list[Scored]:
    """Scores all rows of a split, with Ray up; the same values in the same order as `score_all` gives.

    Args:
        trained: the model, for its job and checkpoint; the workers build their own.
        directory: URI of the run directory, which all nodes must reach.
        split: the rows.
        workers: the most to start; there may be fewer while the cluster has no room.
        tell: hears how many rows are done.

    Raises:
        RaytrainError: a worker could not build the model, or its code failed.
    """
    num_shards = trained.job.num_shards
    groups = -(-len(batches(len(split), num_shards)) // GROUP)
    resources = {name: amount for name, amount in trained.job.scaling.resources_per_worker.items() if amount}
    found: dict[int, list[Scored]] = {}
    scored = ray.data.range(groups, override_num_blocks=groups).map_batches(
        Scorer,
        fn_constructor_args=(directory, trained.checkpoint, [ray.put(split)], num_shards),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(workers, groups)),
        num_cpus=resources.pop("CPU", 0),
        num_gpus=resources.pop("GPU", 0),
        resources=resources or None,
    )
    with quiet_data():
        for row in scored.iter_rows():
            found[row["id"]] = pickle.loads(row["scored"])
            tell(len(split) * len(found) // groups)
    return [part for group in range(groups) for part in found[group]]


def workers_there(job: Job, most: int) -> int:
    """How many workers the cluster has room for, `most` at the most; waits for one as a job does, and asks the autoscaler.

    Raises:
        ClusterError: there was not room for a single one within `scaling.wait_s`.
    """
    scaling = job.scaling.model_copy(update={"workers": Workers.model_validate(f"1..{most}")})
    return wait_for_capacity(job.model_copy(update={"scaling": scaling}), lambda _: None)


@contextmanager
def quiet_data() -> Iterator[None]:
    """Keeps Ray Data's progress and log lines off the terminal, and turns a worker's error into one of ours."""
    logger, context = logging.getLogger("ray.data"), ray.data.DataContext.get_current()
    level, bars = logger.level, context.enable_progress_bars
    logger.setLevel(logging.CRITICAL)
    context.enable_progress_bars = False
    try:
        yield
    except ray.exceptions.RayError as error:
        raise _own(error) from error
    finally:
        logger.setLevel(level)
        context.enable_progress_bars = bars


def _own(error: BaseException) -> RaytrainError:
    """The error that a worker raised on purpose, or one that says in a sentence what it raised."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RaytrainError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    return TrainingError(f"a worker failed: {' '.join(str(error).split())[-400:]}")
