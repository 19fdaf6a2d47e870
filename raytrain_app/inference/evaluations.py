"""Evaluating a run: which rows, where it is computed, and the record of it in the run directory."""

from __future__ import annotations

import json
from typing import Any

from raytrain_app.data.one_split import load_split, read_split
from raytrain_app.inference.evaluation import add_up, record, score_all
from raytrain_app.inference.trained import Trained
from raytrain_app.report.evaluations import path_of
from raytrain_app.storage.folder import Folder


def evaluate_run(
    trained: Trained,
    folder: Folder,
    split: str,
    source: str | None = None,
    workers: int | None = None,
    address: str | None = None,
) -> dict[str, Any]:
    """Evaluates a model; keeps the record of the run's own rows in the run directory, where the report finds it.

    Args:
        trained: the model.
        folder: the run directory.
        split: "train", "validation" or "test".
        source: other rows than the run's own; nothing is kept of these.
        workers: compute on Ray with up to so many workers; None is in this process.
        address: Ray cluster to use; None is the one that RAY_ADDRESS names, else Ray on this machine.

    Returns:
        See `evaluation.record`.

    Raises:
        DataError: there are no such rows, or something is wrong with them.
        ClusterError: the cluster has no room for a single worker.
    """
    job, num_shards = trained.job, trained.job.num_shards
    if workers is None:
        rows = read_split(job, trained.task, split, source)
        num_rows, scored = len(rows[1]), score_all(trained, rows)
    else:
        from raytrain_app.inference.cluster import score_on_cluster, workers_there
        from raytrain_app.session import ray_session

        with ray_session(address):
            workers = workers_there(job, workers)
            loaded = load_split(job, trained.task, split, source)
            num_rows, scored = len(loaded), score_on_cluster(trained, folder.uri, loaded, workers)
    total = add_up(num_rows, num_shards, scored)
    found = record(trained, split if source is None else "given", source or trained.source, num_rows, total)
    if source is None:
        folder.write(path_of(split), json.dumps(found).encode())
    return found
