"""What `raytrain check` prints: the job with everything resolved that is left open in its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from raytrain_app.cluster.document import ClusterFile
from raytrain_app.cluster.fit import fit_rows
from raytrain_app.elastic.progress import steps_per_epoch
from raytrain_app.job import Job
from raytrain_app.job.model import AllReduce
from raytrain_app.storage.folder import Folder
from raytrain_app.task import Task


def plan_lines(job: Job, task: Task, file: ClusterFile | None = None) -> list[str]:
    """The plan as an aligned table, one row a line.

    Args:
        job: what to plan for.
        task: the job's task.
        file: the cluster it is for; None is this machine, or one that is not described.

    Raises:
        StorageError: the storage cannot be looked at.
    """
    rows = list(_rows(job, task))
    if file is None:
        rows.append(("storage", _storage_text(job)))
    else:  # only its machines need to reach the storage
        rows += [("storage", f"{job.storage}/{job.name}"), *fit_rows(job, file)]
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {text}" for label, text in rows]


def _rows(job: Job, task: Task) -> Iterator[tuple[str, str]]:
    options = "".join(f", {key} {value}" for key, value in task.models[job.model.name](**job.model.options).model_dump().items())
    yield "run", job.name
    yield "task", f"{job.task}, {job.framework}"
    yield "model", job.model.name + options
    counts = _row_counts(job, task)
    yield "data", job.data.source or task.default_source
    yield "rows", _row_text(job, counts)
    yield "steps", _step_text(job, counts)
    yield "optimizer", _optimizer_text(job)
    yield "shards", f"{job.num_shards} to a batch, so up to {job.num_shards} workers; reduction {job.train.reduction}"
    yield "workers", f"{job.scaling.workers}, each with {_resources(job.scaling.resources_per_worker)}"
    yield "cluster", _cluster_text(job)
    if isinstance(job.strategy, AllReduce) and job.strategy.tf_distribute:
        yield "group", f"tf.distribute {job.strategy.tf_distribute}; it starts anew when a worker is lost, comes or goes"
    yield (
        "checkpoints",
        f"every {job.checkpoint.every_steps:,} steps, the last {job.checkpoint.keep} and the best {job.checkpoint.monitor}",
    )


def _row_counts(job: Job, task: Task) -> Mapping[str, int] | None:
    """Rows of each split, where the task makes them itself; a file's rows are counted when it is read."""
    generated = task.generate(job.data.source or task.default_source)
    return None if generated is None else {split: len(y) for split, (_, y) in generated.items()}


def _row_text(job: Job, counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return "counted when they are read"
    held = _held_out(job, counts)
    return f"{counts['train'] - held:,} for training, {held:,} for validation, {counts.get('test', 0):,} for the test"


def _step_text(job: Job, counts: Mapping[str, int] | None) -> str:
    batch, epochs = job.train.global_batch_size, job.train.epochs
    text = f"global batch {batch:,}, {epochs} epoch{'s' if epochs > 1 else ''}"
    if counts is None:
        return text
    steps = steps_per_epoch(counts["train"] - _held_out(job, counts), batch)
    return f"{text} of {steps:,} steps, {steps * epochs:,} in all"


def _held_out(job: Job, counts: Mapping[str, int]) -> int:
    return round(counts["train"] * job.data.validation_fraction)


def _optimizer_text(job: Job) -> str:
    optimizer = job.optimizer
    warmup = f" after {optimizer.warmup_steps} warm-up steps" if optimizer.warmup_steps else ""
    return f"{optimizer.name}, learning rate {optimizer.lr:g}, {optimizer.schedule}{warmup}"


def _cluster_text(job: Job) -> str:
    least, most = job.scaling.workers.min, job.scaling.workers.max
    per_worker = {name: amount for name, amount in job.scaling.resources_per_worker.items() if amount}
    needed = _resources({name: amount * least for name, amount in per_worker.items()})
    more = "" if least == most else f", uses up to {_resources({name: amount * most for name, amount in per_worker.items()})}"
    return f"needs {needed}{more}; waits {job.scaling.wait_s:g} s for what it needs"


def _resources(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount) or "no resources"


def _storage_text(job: Job) -> str:
    folder = Folder.open(job.storage).child(job.name)
    taken = folder.exists("job.yaml")
    return f"{folder.uri}{' exists: run it with --resume or under another --name' if taken else ''}"
