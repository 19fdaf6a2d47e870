"""Time to an accuracy with one slow worker among four: parameter servers and synchronous all-reduce, all else equal."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch

from raytrain_app import runner
from raytrain_app.bench.uneven_task import SLOWER
from raytrain_app.data import Reader, load
from raytrain_app.job import Job, job_from_dict
from raytrain_app.state import TrainState
from raytrain_app.storage.checkpoints import CheckpointStore
from raytrain_app.storage.rundir import RunDirectory
from raytrain_app.strategies.worker import build_learner, prepare_process
from raytrain_app.task import load_task

ACCURACY = 0.90
WORKERS = 4
EPOCHS = 12
STRATEGIES = ("parameter_server", "allreduce")


@dataclass
class Reached:
    """How long each strategy took from its first step to the accuracy on the test rows; None if it did not get there."""

    seconds: dict[str, float | None]

    def lines(self) -> list[str]:
        """The findings, with the target."""
        what = f"softmax regression to {ACCURACY:.2f} on the test rows, {WORKERS} workers of which one is {SLOWER} times slower"
        lines = [what]
        for strategy in STRATEGIES:
            seconds = self.seconds[strategy]
            lines.append(f"  {strategy:<17} {'not reached' if seconds is None else f'{seconds:6.1f} s'}")
        ours, theirs = (self.seconds[strategy] for strategy in STRATEGIES)
        if ours is not None and theirs is not None:
            verdict = "reached" if ours <= theirs / 2 else "MISSED "
            lines.append(f"{verdict}  time to accuracy: {ours / theirs:.2f} of all-reduce's (at most 0.5)")
        return lines


def measure_accuracy(tell: Callable[[str], None]) -> Reached:
    """Trains with each strategy; Ray is up and has a CPU for each worker."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="raytrain-bench-") as storage:
        for strategy in STRATEGIES:
            tell(f"training with {strategy}")
            found[strategy] = _seconds_to(_job(strategy, storage))
    return Reached(found)


def _job(strategy: str, storage: str) -> Job:
    return job_from_dict(
        {
            "name": f"bench-{strategy}",
            "task": "raytrain_app.bench.uneven_task:TASK",
            "model": {"name": "linear"},
            "data": {"source": "mnist-sample", "validation_fraction": 0.0},
            "train": {"epochs": EPOCHS, "global_batch_size": 64},
            "optimizer": {"name": "adam", "lr": 0.005},
            "strategy": {"name": strategy},
            "scaling": {"workers": WORKERS},
            "checkpoint": {"every_steps": 20, "keep": 10_000, "monitor": "loss"},
            "storage": storage,
            "tensorboard": False,
        }
    )


def _seconds_to(job: Job) -> float | None:
    """Seconds from the first step to the first checkpoint that is accurate enough; the run ends soon after."""
    result = runner.run(job)
    directory = RunDirectory.open(result.directory)
    times = {line["step"]: line["time"] for line in directory.read_metrics() if line["kind"] == "step"}
    store = CheckpointStore(directory.checkpoints, job.checkpoint.keep, job.checkpoint.monitor, job.checkpoint.mode)
    task = load_task(job.task, job.data.classes)
    prepare_process(job)
    learner = build_learner(job, task, torch.device("cpu"))
    test = load(job, task).test
    assert test is not None, "the embedded digits have test rows"
    x, y = Reader(test.blocks).rows(test.ids)
    for step in sorted(store.steps()):
        found = store.load(f"step-{step:08d}")
        assert found is not None, "a checkpoint that was just listed"
        learner.load(TrainState(found[0].weights, found[0].buffers))
        _, correct, *_ = learner.evaluate(x, y).tolist()
        if correct / len(y) >= ACCURACY:
            return float(times[step] - times[1])
    return None
