"""A worker's loop: take a lease, compute its gradient, push it, and go on with the lease and parameters that come back."""

from __future__ import annotations

from contextlib import suppress
from typing import cast

import numpy as np
import torch
from ray.exceptions import RayError

from raytrain_app.actors import wait_for
from raytrain_app.data import Reader, epoch_order
from raytrain_app.elastic.plan import learning_rate, shard_seed, training_rows
from raytrain_app.elastic.reduce import Shard
from raytrain_app.errors import TrainingError
from raytrain_app.learners.base import Learner
from raytrain_app.strategies.parameter_server.client import Client
from raytrain_app.strategies.parameter_server.ledger import END, WAIT
from raytrain_app.strategies.parameter_server.policy import plan_of
from raytrain_app.strategies.parameter_server.table import Table
from raytrain_app.strategies.worker import Worker


def train(worker: Worker) -> None:
    """Entry of a worker of `strategy: parameter_server`."""
    with suppress(RunOver):
        LeasedWork(worker).run()


class RunOver(Exception):
    """The run has ended, and the servers with it."""


class LeasedWork:
    """One worker's training. It waits for no other worker, and keeps nothing that the run depends on."""

    def __init__(self, worker: Worker) -> None:
        self.job, self.learner, self.link = worker.job, cast(Learner, worker.learner), worker.link
        self._split = worker.dataset.train
        self._reader = Reader(self._split.blocks)
        self._plan = plan_of(self.job, len(self._split))
        self._coordinator = worker.link.membership
        parts = self._plan.parts if self._plan.sync == "bulk" else 0
        self._client = Client(self._where, self.link.info.worker_id, self.learner.layout, parts=parts)
        self._loaded: list[int] = []
        self._order: tuple[int, np.ndarray] = -1, np.empty(0)

    def run(self) -> None:
        """Works until the run is over for this worker."""
        try:
            while self.link.join() is not None and not self._work():
                pass
        finally:
            self._client.close()

    def _work(self) -> bool:
        """Works on leases. True when the run is over, False when this worker was asked to step aside."""
        watch, lease = self.link.stopwatch, WAIT
        watch.switch("idle")
        while lease != END and not self.link.signals.abort:
            if self.link.signals.leave:
                self._client.leave()
                self.link.leave()
                return False
            if lease == WAIT:
                lease = self._client.take()
                continue
            watch.switch("useful")
            lease, counted = self._step(lease)
            watch.switch("idle", book=None if counted else "redone")
        return True

    def _step(self, lease: int) -> tuple[int, bool]:
        """Computes a lease and pushes its gradient; returns the next lease, and whether the gradient was taken."""
        step, part = divmod(lease, self._plan.parts)
        epoch = step // self._plan.steps_per_epoch
        ids = self._rows(step, epoch, part)
        x, y = self._reader.rows(ids)
        self._load()
        shard = self.learner.shard(x, y, shard_seed([self.job.train.seed, epoch, step, part]))
        loss, correct, *extra = shard.scores.tolist()
        sent = self._client.new_push(lease, shard.counters.cpu() - self._client.counters)
        self._fill(sent.vector, shard, len(ids))
        self._refuse_nan(sent.vector, loss, step, epoch)
        rule, total = self.job.optimizer, self.job.train.epochs * self._plan.steps_per_epoch
        sent.lr = learning_rate(rule.schedule, rule.lr, step, total, rule.warmup_steps)
        sent.loss, sent.correct, sent.rows, sent.extra = loss, correct, len(ids), extra
        sent.ids = ids.tolist() if self.job.audit else []
        answer = self._client.push(sent)
        self.link.clock += not answer.refused
        return answer.lease, not answer.refused

    def _load(self) -> None:
        """Gives the learner the newest parameters, if it does not have them."""
        if self._client.versions != self._loaded:
            self.learner.load_flat(self._client.vector, self._client.counters)
            self._loaded = self._client.versions

    def _fill(self, vector: torch.Tensor, shard: Shard, rows: int) -> None:
        """Writes what servers expect: the gradient of the mean loss, in bulk mode of the summed loss; then float buffers."""
        if self._plan.sync == "bulk":
            vector.copy_(shard.vector)
            return
        parameters = self.learner.layout.num_parameters
        gradient = vector[:parameters]
        if shard.vector.device == vector.device:
            torch.div(shard.vector[:parameters], rows, out=gradient)
        else:
            gradient.copy_(shard.vector[:parameters] / rows)
        vector[parameters:].copy_(shard.vector[parameters:])
        if self.job.train.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient)
            gradient.mul_(torch.clamp(self.job.train.clip_norm / (norm + 1e-6), max=1.0))

    def _refuse_nan(self, vector: torch.Tensor, loss: float, step: int, epoch: int) -> None:
        """Stops before something that is not finite reaches a server."""
        largest = float(torch.linalg.vector_norm(vector, ord=float("inf"))) if len(vector) else 0.0
        if not np.isfinite(loss) or not np.isfinite(largest):
            what = "gradient" if np.isfinite(loss) else "loss"
            raise TrainingError(
                f"the {what} is not finite at step {step} of epoch {epoch + 1} (loss {loss}); it was not applied. "
                "Lower optimizer.lr or strategy.staleness, choose a strategy.correction, set train.clip_norm, or check the data"
            )

    def _rows(self, step: int, epoch: int, part: int) -> np.ndarray:
        """Row ids of a lease."""
        if self._order[0] != epoch:
            self._order = epoch, epoch_order(self._split, self.job.train.seed, epoch, self.job.data.order)
        size = self.job.train.global_batch_size
        start = (step - epoch * self._plan.steps_per_epoch) * size
        batch = self._order[1][start : start + size]
        return np.asarray(batch[training_rows(len(batch), self._plan.parts, part)])

    def _where(self, known: Table | None) -> Table | None:
        """Where the servers are now, see `client.Source`."""
        if self.link.signals.abort:
            raise RunOver
        try:
            table: Table | None = wait_for(self._coordinator.table.remote(known))
        except RayError:
            raise RunOver from None
        return table
