"""Validation, checkpoints and the end of a run, beside the workers: an actor with a replica that never trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from raytrain_app.actors import wait_for
from raytrain_app.data import Dataset, Reader, Split
from raytrain_app.elastic.plan import shard_rows
from raytrain_app.elastic.progress import Metrics
from raytrain_app.elastic.reduce import Layout, Ready, Reducer, Shard
from raytrain_app.errors import TrainingError
from raytrain_app.job import job_from_dict
from raytrain_app.learners.base import Learner
from raytrain_app.state import TrainState, weights_sha256
from raytrain_app.storage.checkpoints import CheckpointStore
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.saver import Saver
from raytrain_app.strategies.parameter_server.callbacks import EpochCallbacks
from raytrain_app.strategies.parameter_server.lead import Scored
from raytrain_app.strategies.parameter_server.policy import plan_of, policy_of
from raytrain_app.strategies.parameter_server.shard import ShardState
from raytrain_app.strategies.parameter_server.snapshot import (
    cut_anew,
    first_states,
    from_checkpoint,
    load_into,
    progress_of,
    to_checkpoint,
)
from raytrain_app.strategies.parameter_server.table import FIRST_TABLE, Table
from raytrain_app.strategies.worker import WorkerSpec, build_learner, fetch_dataset, prepare_process, reporting
from raytrain_app.task import load_task

EVALUATION_ROWS = 250
"""Rows of one forward pass, as in the synchronous strategy."""

Result = TypeVar("Result")


class Evaluator:
    """See the module. Its methods run one at a time; an error in one of them ends the run, and the method returns None.

    Args:
        spec: what a worker gets, since it builds the same things.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec, self._coordinator = spec, spec.membership
        self._job = job_from_dict(spec.job)
        folder, rule = Folder.open(spec.directory).child("checkpoints"), self._job.checkpoint
        self._store = CheckpointStore(folder, rule.keep, rule.monitor, rule.mode)
        self._saver = Saver(self._store, self._tell)
        self._saved_step = max(self._store.steps(), default=-1)
        self._scored: dict[int, Scored] = {}
        self._readers: dict[int, Reader] = {}

    def begin(self, servers: int) -> int | None:
        """Gives the servers the state to begin with: that of the newest good checkpoint, else the model's own.

        Args:
            servers: how many there are to be.

        Returns:
            How many there must be at first: a checkpoint whose ranges differ in what they have applied is taken up as it is.
        """
        return self._reported(lambda: self._begin(servers))

    def score(self, epoch: int) -> Scored | None:
        """Validates the parameters at the end of an epoch (from 1), and writes them as a checkpoint."""
        return self._reported(lambda: self._score(epoch))

    def save(self) -> bool | None:
        """Writes the states that the coordinator keeps as a checkpoint."""
        return self._reported(self._save_kept)

    def finish(self, status: str) -> dict[str, Any] | None:
        """Tests the final parameters, makes sure that they are on storage, and returns the run's summary."""
        return self._reported(lambda: self._finish(status))

    # ---- inside ----

    def _begin(self, servers: int) -> int:
        self._callbacks.refuse_batches()
        found = self._store.load("latest")
        if found is None:
            rows, parameters = len(self._dataset.train), self._learner.layout.num_parameters
            states = first_states(self._learner, policy_of(self._job, rows, parameters), servers)
        else:
            saved, step, messages = found
            for message in messages:
                self._tell("checkpoint_damaged", message=message)
            states = from_checkpoint(self._learner, saved)
            if all(state.applied == states[0].applied for state in states):
                states = cut_anew(states, servers)
            self._tell("resume", step=step, samples=progress_of(states[0]).samples, source="checkpoint")
        wait_for(self._coordinator.commit.remote(FIRST_TABLE, states))
        return len(states)

    def _score(self, epoch: int) -> Scored:
        if epoch in self._scored:  # the lead was restored and asks again
            return self._scored[epoch]
        states = self._captured(epoch)
        load_into(self._learner, states)
        progress = progress_of(states[0])
        metrics = self._learner.metrics(progress.extra)
        if self._dataset.validation is not None:
            self._callbacks.run("on_test_begin", {})
            found = self._evaluate(self._dataset.validation)
            self._callbacks.run("on_test_end", found)
            metrics |= {f"val_{name}": value for name, value in found.items()}
            if not math.isfinite(metrics["val_loss"]):
                raise TrainingError(
                    f"the validation loss is not finite after epoch {epoch} ({metrics}); lower optimizer.lr or check the data"
                )
        rows = max(1, progress.rows)
        everything = {"loss": progress.loss_sum / rows, "accuracy": progress.correct / rows, **metrics}
        stop = self._callbacks.epoch_ends(epoch, everything)
        self._save(progress.step, to_checkpoint(self._learner, states), everything)
        self._scored[epoch] = Scored(metrics, stop)
        return self._scored[epoch]

    def _captured(self, epoch: int) -> list[ShardState]:
        """The states of all servers at the end of an epoch."""
        while True:
            places = self._table().places
            states: list[ShardState] = wait_for([place.handle.captured.remote(epoch) for place in places])
            if all((state.start, state.stop) == (place.start, place.stop) for state, place in zip(states, places, strict=True)):
                return states  # else ranges were cut anew meanwhile

    def _save_kept(self) -> bool:
        states = wait_for(self._coordinator.kept.remote())
        # There are none just after the coordinator's restart. From states with an epoch that is still to be scored nobody could
        # go on with the same metrics; that epoch's end is written as soon as it is.
        if states and not states[0].ends and progress_of(states[0]).step > self._saved_step:
            self._save(progress_of(states[0]).step, to_checkpoint(self._learner, states), {})
        return True

    def _finish(self, status: str) -> dict[str, Any]:
        states = wait_for([place.handle.state.remote() for place in self._table().places])
        progress, checkpoint = progress_of(states[0]), to_checkpoint(self._learner, states)
        if status != "stopped":
            self._callbacks.run("on_train_end", progress.metrics)  # it may give the model other weights
        test = self._dataset.test
        tested = self._evaluate(test) if test is not None and status != "stopped" else {}
        weights = self._learner.weights()
        if not all(np.isfinite(array).all() for array in weights.values()):
            raise TrainingError(f"the weights are not finite after step {progress.step}; lower optimizer.lr")
        if progress.step > self._saved_step or weights_sha256(weights) != weights_sha256(checkpoint.weights):
            self._save(progress.step, replace(checkpoint, weights=weights), {})
        self._saver.drain()
        if self._learner.own_file is not None and status != "stopped":
            self._export(self._learner.own_file)
        return {
            "status": status,
            "epochs": progress.epoch,
            "steps": progress.step,
            "samples": progress.samples,
            "train_loss": progress.metrics.get("loss"),
            "val_loss": progress.metrics.get("val_loss"),
            "val_accuracy": progress.metrics.get("val_accuracy"),
            "test_loss": tested.get("loss"),
            "test_accuracy": tested.get("accuracy"),
            "weights_sha256": weights_sha256(weights),
        }

    def _save(self, step: int, state: TrainState, metrics: Metrics) -> None:
        self._saver.save(step, lambda: state, metrics)
        self._saved_step = max(step, self._saved_step)

    def _export(self, name: str) -> None:
        """Saves the best model in the framework's own format too, beside its checkpoint; the learner is of no use after it."""
        found = self._store.load("best") or self._store.load("latest")
        if found is None:
            return
        state, step, _ = found
        self._learner.load(TrainState(state.weights, state.buffers))
        try:
            self._store.attach(step, name, self._learner.export())
        except Exception as error:  # a model's own code may not bear to be saved; its checkpoint is there all the same
            self._tell("export_failed", file=name, error=f"{type(error).__name__}: {error}")

    def _evaluate(self, split: Split) -> Metrics:
        """Loss and accuracy over all rows of a split, added up as in the synchronous strategy."""
        reader = self._readers.setdefault(id(split.blocks), Reader(split.blocks))
        shards, nothing = self._job.num_shards, torch.empty(0)
        layout = Layout(num_scores=self._learner.layout.num_scores)

        def shard(number: int, ready: Ready | None) -> Shard:
            ids = split.ids[shard_rows(len(split), shards, number)]
            scores = torch.zeros(layout.num_scores, dtype=torch.float64)
            for start in range(0, len(ids), EVALUATION_ROWS):
                scores += self._learner.evaluate(*reader.rows(ids[start : start + EVALUATION_ROWS]))
            return Shard(nothing, nothing.long(), scores)

        total = Reducer(0, 1, shards, layout, 0, torch.device("cpu")).reduce(shard, len(split), 1, [])
        own = self._learner.metrics(total.extra)
        return {"loss": total.loss / len(split), "accuracy": total.correct / len(split), **own}

    def _table(self) -> Table:
        while True:
            table: Table | None = wait_for(self._coordinator.table.remote(None))
            if table is not None:
                return table

    @cached_property
    def _learner(self) -> Learner:
        prepare_process(self._job)
        task = load_task(self._job.task, self._job.data.classes)
        return build_learner(self._job, task, torch.device("cpu"), self._spec.directory)

    @cached_property
    def _callbacks(self) -> EpochCallbacks:
        steps = plan_of(self._job, len(self._dataset.train)).steps_per_epoch
        return EpochCallbacks(self._learner, steps)

    @cached_property
    def _dataset(self) -> Dataset:
        return fetch_dataset(self._spec)

    def _reported(self, call: Callable[[], Result]) -> Result | None:
        with reporting(self._coordinator):
            return call()
        return None

    def _tell(self, kind: str, **details: Any) -> None:
        self._coordinator.record.remote([(None, {"kind": kind, "time": time.time(), **details})])
