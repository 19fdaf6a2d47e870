"""What `raytrain check` prints: the job with everything resolved that is left open in its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from raytrain_app.cluster.document import ClusterFile
from raytrain_app.cluster.fit import fit_rows
from raytrain_app.elastic.progress import steps_per_epoch
from raytrain_app.job import Job
from raytrain_app.job.strategies import AllReduce, ParameterServer
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
    generated = task.generate(job.data.source or task.default_source)
    counts = None if generated is None else {split: len(y) for split, (_, y) in generated.items()}
    yield "data", job.data.source or task.default_source
    yield "rows", _row_text(job, counts)
    if generated is not None and (least := task.least_loss(generated["train"])) is not None:
        yield "best loss", f"{least:.4f}: no model can do better on such rows"
    yield "steps", _step_text(job, counts)
    yield "optimizer", _optimizer_text(job)
    if isinstance(job.strategy, ParameterServer):
        yield "servers", _servers_text(job.strategy)
    sharing = job.num_shards * job.replica_workers
    if job.most_workers == sharing:  # else a batch is not cut
        yield "shards", f"{job.num_shards} to a batch, so up to {sharing} workers; reduction {job.train.reduction}"
    yield "workers", f"{job.scaling.workers}, each with {_resources(job.scaling.resources_per_worker)}"
    if job.replica_workers > 1:
        yield from _parts_rows(job, task)
    yield "cluster", _cluster_text(job)
    if isinstance(job.strategy, AllReduce) and job.strategy.tf_distribute:
        yield "group", f"tf.distribute {job.strategy.tf_distribute}; it starts anew when a worker is lost, comes or goes"
    yield (
        "checkpoints",
        f"every {job.checkpoint.every_steps:,} steps, the last {job.checkpoint.keep} and the best {job.checkpoint.monitor}",
    )


def _parts_rows(job: Job, task: Task) -> Iterator[tuple[str, str]]:
    from raytrain_app.learners.costs import stage_plan
    from raytrain_app.learners.footprint import footprint

    ways = {way: getattr(job.strategy, way) for way in ("fsdp", "tensor", "pipeline")}
    cut = " x ".join(f"{way} {count}" for way, count in ways.items() if count > 1)
    least, most = (count // job.replica_workers for count in (job.scaling.workers.min, job.scaling.workers.max))
    replicas = f"{least}" if least == most else f"{least}..{most}"
    yield "replicas", f"{replicas}, each of {job.replica_workers} workers on one node: {cut}"
    if plan := stage_plan(job, task):
        stages = (names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in plan)
        yield "stages", f"{', '.join(stages)}; in turn on {ways['pipeline']} workers"
    try:
        need = footprint(job, task)
    except Exception as error:  # of the task's own code, which need not bear tensors without values
        yield "memory", f"cannot be told before the model computes ({type(error).__name__}: {' '.join(str(error).split())})"
        return
    sizes = f"parameters {_bytes(need.parameters)}, gradients as much, optimizer {_bytes(need.optimizer)}"
    yield "memory", f"up to {_bytes(need.total)} a worker: {sizes}, activations {_bytes(need.activations)}"
    given = job.scaling.resources_per_worker.get("memory", 0.0)
    if 0 < given < need.total:
        yield "warning", f"resources_per_worker.memory is {_bytes(int(given))}, so the model will not fit; cut it further"


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"


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


def _servers_text(strategy: ParameterServer) -> str:
    servers = f"{strategy.servers}{f', each with {strategy.server_cpus:g} CPU' if strategy.server_cpus else ''}; "
    if strategy.sync == "bulk":
        return f"{servers}bulk: all workers on one step"
    bound = "" if strategy.staleness is None else f", gradients miss up to {strategy.staleness} updates"
    return f"{servers}{strategy.sync}{bound}, correction {strategy.correction}, update {strategy.update}"


def _cluster_text(job: Job) -> str:
    least, most = job.scaling.workers.min, job.scaling.workers.max
    per_worker = {name: amount for name, amount in job.scaling.resources_per_worker.items() if amount}
    servers = job.strategy.servers * job.strategy.server_cpus if isinstance(job.strategy, ParameterServer) else 0.0

    def of(workers: int) -> str:
        amounts = {name: amount * workers for name, amount in per_worker.items()}
        return _resources({**amounts, "CPU": amounts.get("CPU", 0.0) + servers})

    needed, more = of(least), "" if least == most else f", uses up to {of(most)}"
    return f"needs {needed}{more}; waits {job.scaling.wait_s:g} s for what it needs"


def _resources(amounts: Mapping[str, float]) -> str:
    texts = {name: _bytes(int(amount)) if name == "memory" else f"{amount:g}" for name, amount in amounts.items() if amount}
    return ", ".join(f"{text} {name}" for name, text in texts.items()) or "no resources"


def _storage_text(job: Job) -> str:
    folder = Folder.open(job.storage).child(job.name)
    taken = folder.exists("job.yaml")
    return f"{folder.uri}{' exists: run it with --resume or under another --name' if taken else ''}"
