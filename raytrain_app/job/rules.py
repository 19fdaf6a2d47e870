"""Rules about several keys of a job at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain_app.job.model import Job


@dataclass(frozen=True)
class BrokenRule:
    """One broken rule: the key to change, the other keys it involves, and a sentence."""

    path: str
    text: str
    others: tuple[str, ...] = ()


def broken_rules(job: Job) -> Iterator[BrokenRule]:
    """Every rule that `job`, right key by key, breaks as a whole."""
    yield from _sizes(job)
    yield from _optimizer(job)
    yield from _metrics(job)
    yield from _devices(job)
    yield from _frameworks(job)
    yield from _parameter_server(job)
    yield from _model_parallel(job)


def value_at(job: Any, path: str) -> Any:
    """The value of a dotted key, None where the section in force has no such key."""
    for part in path.split("."):
        job = getattr(job, part, None)
    return job


def _sizes(job: Job) -> Iterator[BrokenRule]:
    shards, workers, batch = job.num_shards, job.scaling.workers, job.train.global_batch_size
    if workers.max > job.most_workers:
        least = -(-workers.max // job.replica_workers)
        yield BrokenRule(
            "scaling.workers",
            f"found {workers}, but train.virtual_shards is {shards} and a worker without a shard has nothing to do; "
            f"expected at most {job.most_workers} workers, or virtual_shards of at least {least}",
            ("train.virtual_shards",),
        )
    if job.most_workers == shards * job.replica_workers and batch < shards:
        yield BrokenRule(
            "train.global_batch_size",
            f"found {batch}; expected at least {shards}, one row for each virtual shard",
            ("train.virtual_shards", "scaling.workers"),
        )


def _optimizer(job: Job) -> Iterator[BrokenRule]:
    if job.optimizer.warmup_steps and job.optimizer.schedule == "constant":
        yield BrokenRule(
            "optimizer.warmup_steps",
            f"found {job.optimizer.warmup_steps} with schedule: constant, which has no warm-up; expected 0, "
            "or schedule: linear or cosine",
            ("optimizer.schedule",),
        )


def _metrics(job: Job) -> Iterator[BrokenRule]:
    sections = {"checkpoint": job.checkpoint, "train.early_stopping": job.train.early_stopping}
    for path, section in sections.items():
        if section is None:
            continue
        best = "max" if section.monitor.endswith("accuracy") else "min"
        if section.mode != best:
            yield BrokenRule(f"{path}.mode", f"found {section.mode}; expected {best} for {section.monitor}", (f"{path}.monitor",))
        if section.monitor.startswith("val_") and job.data.validation_fraction == 0:
            yield BrokenRule(
                f"{path}.monitor",
                f"found {section.monitor}, but data.validation_fraction is 0, so there are no validation rows; "
                "expected loss or accuracy, or a validation_fraction above 0",
                ("data.validation_fraction",),
            )


def _devices(job: Job) -> Iterator[BrokenRule]:
    gpus, path = job.scaling.resources_per_worker["GPU"], "scaling.resources_per_worker.GPU"
    if job.scaling.device == "cuda" and gpus == 0:
        yield BrokenRule("scaling.device", f"found cuda, but {path} is 0; expected GPU: 1, or device: auto", (path,))
    if job.train.cuda_graphs:
        yield from _graphs(job)
    if not job.scaling.uses_gpu:
        return
    if 0 < gpus < 1 and job.scaling.workers.max > 1:
        yield BrokenRule(
            path,
            f"found GPU: {gpus:g} for {job.scaling.workers} workers, but NCCL cannot reduce between workers on one GPU; "
            "expected GPU: 1, or workers: 1",
            ("scaling.workers", "scaling.device"),
        )
    if gpus > 1 and value_at(job, "strategy.tf_distribute") is None:
        yield BrokenRule(
            path,
            f"found GPU: {gpus:g}, but a worker computes on one GPU; expected GPU: 1, with more workers to use more GPUs",
            ("scaling.device", "strategy.tf_distribute"),
        )


def _graphs(job: Job) -> Iterator[BrokenRule]:
    """Rules of `cuda_graphs: true`."""
    needs = {
        "scaling.resources_per_worker.GPU": (job.scaling.uses_gpu, "workers compute on CPUs; expected false, or GPU: 1"),
        "framework": (job.framework == "torch", "the framework is tensorflow; expected false, or framework: torch"),
        "train.reduction": (job.train.reduction == "exact", "the reduction is fast; expected false, or reduction: exact"),
        "strategy.name": (job.replica_workers == 1, "a model in parts cannot be recorded; expected false"),
    }
    for path, (met, text) in needs.items():
        if not met:
            yield BrokenRule("train.cuda_graphs", f"found true, but {text}", (path,))


def _frameworks(job: Job) -> Iterator[BrokenRule]:
    path, kind = "strategy.tf_distribute", value_at(job, "strategy.tf_distribute")
    fast, workers = job.train.reduction == "fast", job.scaling.workers
    if kind is not None and job.framework != "tensorflow":
        yield BrokenRule(path, f"is for framework: tensorflow; expected null for framework: {job.framework}", ("framework",))
        return
    if kind is not None and not fast:
        yield BrokenRule(
            path, f"found {kind} with train.reduction: exact, which needs none; expected null, or fast", ("train.reduction",)
        )
    if kind is None and fast and job.framework == "tensorflow" and job.strategy.name == "allreduce":
        yield BrokenRule(
            "train.reduction",
            "found fast, which for framework: tensorflow is one of TensorFlow's own strategies; expected exact, or "
            "strategy.tf_distribute: multi_worker_mirrored, mirrored, central_storage or one_device",
            (path, "framework"),
        )
    if kind not in (None, "multi_worker_mirrored") and workers.max > 1:
        yield BrokenRule(
            "scaling.workers",
            f"found {workers}, but strategy.tf_distribute: {kind} uses the devices of one worker; "
            "expected 1, or tf_distribute: multi_worker_mirrored",
            (path,),
        )


def _parameter_server(job: Job) -> Iterator[BrokenRule]:
    if job.strategy.name != "parameter_server":
        return
    sync = value_at(job, "strategy.sync")
    if sync == "bounded" and value_at(job, "strategy.staleness") is None:
        yield BrokenRule(
            "strategy.staleness",
            "found null with sync: bounded, which bounds it; expected a number of updates, such as 8, or sync: async",
            ("strategy.sync",),
        )
    if sync == "bulk" and value_at(job, "strategy.staleness") is not None:
        yield BrokenRule(
            "strategy.staleness",
            f"found {value_at(job, 'strategy.staleness')} with sync: bulk, where no gradient misses an update; "
            "expected null, or sync: bounded or async",
            ("strategy.sync",),
        )
    if sync == "bulk" and job.train.clip_norm is not None:
        yield BrokenRule(
            "train.clip_norm",
            f"found {job.train.clip_norm:g} with sync: bulk, but no server knows the whole gradient of a step; "
            "expected null, or sync: async or bounded, or strategy: {name: allreduce}",
            ("strategy.sync",),
        )
    if job.train.reduction == "fast":
        yield BrokenRule(
            "train.reduction",
            "found fast, which is about all-reduce, but the strategy is parameter_server; expected exact",
            ("strategy.name",),
        )


def _model_parallel(job: Job) -> Iterator[BrokenRule]:
    if job.strategy.name != "model_parallel":
        return
    if job.framework == "tensorflow":
        yield BrokenRule(
            "strategy.name",
            "found model_parallel with framework: tensorflow, but only PyTorch's modules can be cut over workers; expected "
            "framework: torch, or strategy: {name: allreduce}, where each worker holds the whole model",
            ("framework",),
        )
    if job.train.reduction == "fast":
        yield BrokenRule(
            "train.reduction", "found fast, but replicas in parts are added up exactly alone; expected exact", ("strategy.name",)
        )
    peers, workers = job.replica_workers, job.scaling.workers
    if peers == 1:
        yield BrokenRule(
            "strategy.fsdp",
            "found 1, and tensor and pipeline are 1 too, so each worker would hold the whole model; expected 2 or more for "
            "one of them, or strategy: {name: allreduce}",
            ("strategy.tensor", "strategy.pipeline"),
        )
    if workers.min % peers or workers.max % peers:
        yield BrokenRule(
            "scaling.workers",
            f"found {workers}, but fsdp x tensor x pipeline = {peers} workers hold a replica together; "
            f"expected multiples of {peers}",
            ("strategy.fsdp", "strategy.tensor", "strategy.pipeline"),
        )
    microbatches, stages = value_at(job, "strategy.microbatches"), value_at(job, "strategy.pipeline")
    if (stages > 1 and microbatches < stages) or (stages == 1 and microbatches > 1):
        yield BrokenRule(
            "strategy.microbatches",
            f"found {microbatches} for a pipeline of {stages} stages; expected "
            + ("at least as many, so that all stages have work" if stages > 1 else "1, since nothing goes through a pipeline"),
            ("strategy.pipeline",),
        )
    yield from _interleaving(job, microbatches, stages)


def _interleaving(job: Job, microbatches: int, workers: int) -> Iterator[BrokenRule]:
    """Rules of `schedule: interleaved`, for a pipeline of some workers."""
    path, each, schedule = "strategy.stages_per_worker", value_at(job, "strategy.stages_per_worker"), "strategy.schedule"
    if value_at(job, schedule) != "interleaved":
        if each > 1:
            text = f"found {each} with schedule: {value_at(job, schedule)}; expected 1, or schedule: interleaved"
            yield BrokenRule(path, text, (schedule,))
        return
    if workers == 1:
        text = "found interleaved without a pipeline; expected 1f1b, or strategy.pipeline of 2 or more"
        yield BrokenRule(schedule, text, ("strategy.pipeline",))
        return
    if each == 1:
        yield BrokenRule(path, "found 1 with schedule: interleaved; expected 2 or more, or schedule: 1f1b", (schedule,))
    rounds = max(1, microbatches // workers)
    if microbatches % rounds:
        yield BrokenRule(
            "strategy.microbatches",
            f"found {microbatches}, which {workers} workers take in {rounds} turns with schedule: interleaved; expected a "
            f"multiple of {rounds}, such as {microbatches // rounds * rounds}",
            (schedule, "strategy.pipeline"),
        )
