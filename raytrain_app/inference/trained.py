"""A trained model, built again from its run directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raytrain_app.errors import JobError, StorageError
from raytrain_app.job import Job
from raytrain_app.state import TrainState, weights_sha256
from raytrain_app.storage.checkpoints import CheckpointStore
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.rundir import RunDirectory
from raytrain_app.task import Task, load_task

if TYPE_CHECKING:
    from raytrain_app.learners.base import Learner

BATCH_ROWS = 250
"""Rows of one forward pass, the same as in the evaluations of training, so that kernels round the same way."""


@dataclass
class Trained:
    """A model with the weights of one checkpoint.

    Attributes:
        checkpoint: name of the checkpoint, such as "step-00000200".
        sha256: hash of the weights, as in result.json.
        messages: checkpoints that were passed over because they are damaged.
    """

    job: Job
    task: Task
    learner: Learner
    state: TrainState
    checkpoint: str
    sha256: str
    messages: list[str]

    @property
    def source(self) -> str:
        """Where the rows came from that it was trained on."""
        return self.job.data.source or self.task.default_source

    @property
    def num_classes(self) -> int:
        """Classes that it tells apart."""
        return self.task.columns.num_classes

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """Probability of each class, float64 (rows, classes), for rows x (rows, *shape)."""
        return self.task.probabilities(self.outputs(x))

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """What the model puts out, float32 (rows, ...), for rows x (rows, *shape)."""
        return np.concatenate([self.learner.outputs(x[i : i + BATCH_ROWS]) for i in range(0, len(x), BATCH_ROWS)])

    def label(self, class_index: int) -> int:
        """The class as the data's labels call it."""
        return class_index + self.job.data.label_offset


def load_trained(folder: Folder, which: str = "latest", *, on_cpu: bool = False) -> Trained:
    """Builds the model of a run with the weights of a checkpoint.

    Args:
        folder: the run directory.
        which: "latest", "best", a step, or a name such as "step-00000200".
        on_cpu: compute on the CPU also where the run trained on GPUs.

    Raises:
        StorageError: there is no run or no such checkpoint, or it does not fit the job.
        JobError: the task cannot be imported, or no longer has the model.
    """
    directory = RunDirectory(folder)
    job = directory.read_job()
    store = CheckpointStore(directory.checkpoints, job.checkpoint.keep, job.checkpoint.monitor, job.checkpoint.mode)
    found = store.load(f"step-{int(which):08d}" if which.isdecimal() else which)
    if found is None:
        if which == "best" and store.steps():
            raise StorageError(
                f"no checkpoint in {directory.checkpoints.at('')} has a {job.checkpoint.monitor}; use --checkpoint latest"
            )
        raise StorageError(f"there is no checkpoint in {directory.checkpoints.at('')}; train the run a little longer")
    state, step, messages = found
    _prepare_process(job)
    task = load_task(job.task, job.data.classes)
    if job.model.name not in task.models:
        raise JobError(f"task {job.task} has no model {job.model.name!r} any more, only {', '.join(task.models)}; restore it")
    learner = _build(job, task, on_cpu)
    learner.load(TrainState(state.weights, state.buffers))  # nothing is trained, so the optimizer's state may be anybody's
    return Trained(job, task, learner, state, f"step-{step:08d}", weights_sha256(state.weights), messages)


def _prepare_process(job: Job) -> None:
    """The environment that training computed in; it must be set before the framework is imported."""
    from raytrain_app.pool import environment

    for name, value in environment(job).items():
        os.environ.setdefault(name, value)
    from raytrain_app.strategies.worker import prepare_process

    prepare_process(job)


def _build(job: Job, task: Task, on_cpu: bool) -> Learner:
    import torch

    from raytrain_app.strategies.worker import build_learner

    on_gpu = not on_cpu and job.scaling.uses_gpu and torch.cuda.is_available()
    return build_learner(job, task, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
