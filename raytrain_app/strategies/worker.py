"""What every strategy's workers do alike: build task and learner from names, open the link, turn errors into outcomes."""

from __future__ import annotations

import ctypes
import platform
import socket
import traceback
import uuid
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import torch

from raytrain_app.actors import Actor
from raytrain_app.data import Dataset
from raytrain_app.data.reader import bring_here, fetch
from raytrain_app.elastic.group import Rendezvous, choose_interface
from raytrain_app.elastic.link import Link
from raytrain_app.elastic.liveness import end_with_raylet
from raytrain_app.elastic.progress import Stopwatch
from raytrain_app.elastic.roster import WorkerInfo
from raytrain_app.errors import ClusterError, RaytrainError, TrainingError
from raytrain_app.job import Job, job_from_dict
from raytrain_app.learners.base import Learner, Part
from raytrain_app.storage.rundir import require_shared
from raytrain_app.task import Task, load_task

NO_POOL = -1
"""Instead of a pool's number, for what is built like a worker and is none."""
KEPT = {-1: 1 << 30, -3: 32 << 20}
"""Bytes, by the name they have in glibc's malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD (this is the largest that it takes)."""


@dataclass(frozen=True)
class WorkerSpec:
    """All that travels to a worker; it builds the rest itself.

    Attributes:
        job: the resolved job as plain data.
        dataset: reference of what `Membership.dataset` gives, see `fetch_dataset`.
        membership: handle of the run's membership actor.
        vault: handle of the actor that holds snapshots.
        directory: URI of the run directory.
        pool: number of the pool that the worker belongs to.
    """

    job: Mapping[str, Any]
    dataset: ray.ObjectRef[list[ray.ObjectRef[Dataset]]]
    membership: Actor
    vault: Actor | None
    directory: str
    pool: int


@dataclass
class Worker:
    """One worker's own objects."""

    job: Job
    task: Task
    learner: Part
    dataset: Dataset
    link: Link
    rendezvous: Rendezvous
    device: torch.device
    directory: str
    vault: Actor | None


@contextmanager
def reporting(membership: Actor) -> Any:
    """Ends the run with the error when the body raises one; the worker itself returns normally, so nobody restarts it."""
    try:
        yield
    except RaytrainError as error:
        ray.get(membership.fail.remote(error))
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        ray.get(membership.fail.remote(TrainingError(text, traceback.format_exc())))


def run_worker(spec: WorkerSpec, train: Callable[[Worker], None]) -> None:
    """Body of a pool's train function: builds the worker and hands it to the strategy's `train`."""
    stopwatch = Stopwatch()
    end_with_raylet()
    context = ray.train.get_context()
    place = context.get_world_rank()
    worker_id = f"{spec.pool}.{place}-{uuid.uuid4().hex[:6]}"
    with reporting(spec.membership):
        job = job_from_dict(spec.job)
        worker = _build(spec, job, worker_id, place, stopwatch)
        require_shared(spec.directory)  # which the driver has made when it gives the data
        try:
            train(worker)
        finally:
            worker.link.deliver()
            worker.link.close()


def _build(spec: WorkerSpec, job: Job, worker_id: str, place: int, stopwatch: Stopwatch) -> Worker:
    import os

    host = ray.util.get_node_ip_address()
    interface = choose_interface(host)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    rendezvous = Rendezvous(host)
    prepare_process(job)
    device = choose_device(job)
    context = ray.get_runtime_context()
    info = WorkerInfo(
        worker_id=worker_id,
        pool=spec.pool,
        node_id=context.get_node_id(),
        pid=os.getpid(),
        host=host,
        port=rendezvous.port,
        handle=context.current_actor,
        started_time_s=stopwatch.started_time_s,
        kind=_kind(job, device),
        peers=job.replica_workers,
        place=place if job.replica_workers > 1 else 0,
    )
    link = Link(spec.membership, info, stopwatch)
    task = load_task(job.task, job.data.classes)
    dataset = fetch_dataset(spec)
    bring_here(dataset.train.blocks)  # while the others train: once this worker has joined, they wait for it at each step
    learner = build_part(job, task, device) if job.replica_workers > 1 else build_learner(job, task, device, spec.directory)
    return Worker(job, task, learner, dataset, link, rendezvous, device, spec.directory, spec.vault)


def choose_device(job: Job) -> torch.device:
    """Where PyTorch computes in a worker. TensorFlow has a GPU to itself: its gradients are summed on the host.

    Raises:
        ClusterError: Ray gave the worker a GPU that PyTorch does not see.
    """
    if not job.scaling.uses_gpu or job.framework != "torch":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        raise ClusterError(
            f"host {socket.gethostname()} declares a GPU, and PyTorch sees none there: torch {torch.__version__} is built for "
            f"{build}. Look with nvidia-smi whether the driver is installed, and was before Ray started; "
            "install a torch for its CUDA, or correct the resources that the node declares"
        )
    return torch.device("cuda", torch.cuda.current_device())


def fetch_dataset(spec: WorkerSpec) -> Dataset:
    """The run's data set, as soon as the driver has read and checked the data.

    Raises:
        TrainingError: the driver has given up before.
    """
    found = ray.get(spec.dataset)
    if not found:
        raise TrainingError("the run was over before it began")
    return fetch(found)[0]


def prepare_process(job: Job) -> None:
    """Sets up the job's framework, before the task's module is imported: it may use the framework at once."""
    from raytrain_app.learners import torch_parts

    _keep_memory()
    torch_parts.prepare_process(job)
    if job.framework == "tensorflow":
        from raytrain_app.learners import tensorflow_process

        tensorflow_process.prepare_process(job)


def _keep_memory() -> None:
    """Has the C library keep for the next step what a step has freed, up to 1 GiB, in blocks of up to 32 MiB.

    Without it glibc gives activations back to the system after each step and then gets them anew, which zeroes them page by
    page: a tenth to a quarter of a small CNN's step. Another C library stays as it is.
    """
    if platform.libc_ver()[0] == "glibc":
        for parameter, num_bytes in KEPT.items():
            ctypes.CDLL(None).mallopt(parameter, num_bytes)


def build_learner(job: Job, task: Task, device: torch.device, directory: str | None = None) -> Learner:
    """The learner of the job's framework; the framework is imported here and nowhere before.

    Args:
        job: says which framework and model.
        task: builds the model.
        device: for PyTorch.
        directory: URI of the run directory, for a framework's own callbacks; None where nothing is trained.
    """
    if job.framework == "tensorflow" and job.train.reduction == "fast" and directory is not None:
        from raytrain_app.learners.tf_distribute import DistributedLearner

        return DistributedLearner(job, task, directory)
    if job.framework == "tensorflow":
        from raytrain_app.learners.keras import KerasLearner

        return KerasLearner(job, task, directory)
    from raytrain_app.learners.torch import TorchLearner

    return TorchLearner(job, task, device)


def build_part(job: Job, task: Task, device: torch.device) -> Part:
    """The learner of a worker that holds a part of a replica."""
    from raytrain_app.learners.sharded import ShardedLearner

    return ShardedLearner(job, task, device)


def _kind(job: Job, device: torch.device) -> dict[str, str]:
    """What this worker computes on: whatever may change bits."""
    # torch's version is a class of its own, for which the membership would have to load torch.
    kind = {"torch": str(torch.__version__), "cpu": cpu_model(), "capability": torch.backends.cpu.get_cpu_capability()}
    if job.framework == "tensorflow":
        from raytrain_app.learners import tensorflow_process

        kind |= tensorflow_process.describe(fast=job.train.reduction == "fast")
    if device.type == "cuda":
        kind["gpu"] = torch.cuda.get_device_name(device)
        kind["cuda"] = str(torch.version.cuda)
    return kind


def cpu_model() -> str:
    """The name that the processor gives itself, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine()
