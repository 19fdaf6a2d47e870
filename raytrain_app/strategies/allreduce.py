"""The synchronous strategy: one generation of workers, the same step on all of them, in place through every change.

`AllReduce.run` is the whole life of a worker: form a generation, take over the leader's state if behind, train until
somebody comes, goes or is lost, and again. All decisions below are functions of values that every worker holds equal.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from raytrain_app.data import Reader, Split, epoch_order
from raytrain_app.elastic.group import Group, PeerLost, collective
from raytrain_app.elastic.plan import learning_rate, owned_shards, shard_rows, shard_seed
from raytrain_app.elastic.progress import Metrics, Progress, steps_per_epoch
from raytrain_app.elastic.reduce import NUM_SCORES, Layout, Reducer, Shard, Total
from raytrain_app.elastic.roster import Generation
from raytrain_app.errors import TrainingError
from raytrain_app.state import TrainState, weights_sha256
from raytrain_app.storage.checkpoints import CheckpointStore
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.saver import Saver
from raytrain_app.strategies.worker import Worker

JOIN, LEAVE, CHECKPOINT, STOP = range(4)
"""Places of the control flags in the reduced buffer."""
EVALUATION_ROWS = 250
"""Rows of one forward pass in evaluation. A constant, since kernels may round differently for other sizes."""


def train(worker: Worker) -> None:
    """Entry of a worker of `strategy: allreduce`."""
    AllReduce(worker).run()


class AllReduce:
    """One worker's training. Methods that reduce are called by all members of the generation, in the same order."""

    def __init__(self, worker: Worker) -> None:
        self.job, self.learner, self.link = worker.job, worker.learner, worker.link
        self._worker = worker
        self._split = worker.dataset.train
        self._readers: dict[int, Reader] = {}
        self._steps = steps_per_epoch(len(self._split), self.job.train.global_batch_size)
        self._store = CheckpointStore(
            Folder.open(worker.directory).child("checkpoints"),
            self.job.checkpoint.keep,
            self.job.checkpoint.monitor,
            self.job.checkpoint.mode,
        )
        self._saver = Saver(self._store, self.link.event)
        self.progress = Progress()
        self._order: tuple[int, np.ndarray] | None = None

    # ---- generations ----

    def run(self) -> None:
        """Trains until the run is over for this worker."""
        while (generation := self.link.join()) is not None:
            group = None
            try:
                group = Group(generation, self._worker.rendezvous, 2 * self.job.failure.heartbeat_s, self.learner.device)
                if self._train(group):
                    break
                self.link.stopwatch.switch("idle")
            except PeerLost:
                self.link.stopwatch.switch("idle", book="redone")
            finally:
                if group is not None:
                    group.close()
        self._saver.drain()

    def _train(self, group: Group) -> bool:
        """Trains in one generation. True when this worker is done, False when another generation is to be formed."""
        self._take_over(group)
        self._reducer = self._make_reducer(group, self.learner.layout)
        self._scorer = self._make_reducer(group, Layout())
        self._group = group
        if self.job.train.reduction == "fast":
            self.learner.connect(group.world_size)  # type: ignore[attr-defined]
        self.link.stopwatch.switch("useful")
        while not self.progress.finished(self.job):
            if self._at_epoch_end():
                self._end_epoch()
                continue
            leaving = self.link.signals.leave
            flags = self._step(leaving)
            if flags[STOP]:
                self._finish("stopped")
                return True
            # The end of an epoch is checkpointed after its validation.
            if flags[CHECKPOINT] or (self.progress.step % self.job.checkpoint.every_steps == 0 and not self._at_epoch_end()):
                self._checkpoint()
            if flags[LEAVE] or flags[JOIN]:
                if leaving:
                    self.link.leave()
                return False
        self._finish("early_stopped" if self.progress.stopped_early else "finished")
        return True

    def _make_reducer(self, group: Group, layout: Layout) -> Reducer:
        return Reducer(group.rank, group.world_size, self.job.num_shards, layout, 4, self.learner.device)

    def _take_over(self, group: Group) -> None:
        """Brings members that are behind to the leader's state; a leader without state restores the newest or starts."""
        generation: Generation = group.generation
        if generation.leader_clock < 0 and generation.rank == 0:
            self._restore()
        if generation.behind:
            mine = self._snapshot().to_bytes() if generation.rank == 0 else None
            data = group.broadcast_bytes(mine)
            if generation.rank in generation.behind:
                self._load(TrainState.from_bytes(data))
        self.link.clock = self.progress.clock

    def _restore(self) -> None:
        """Goes on from the newest good checkpoint on storage, if there is one."""
        found = self._store.load("latest")
        if found is None:
            return
        state, step, messages = found
        for message in messages:
            self.link.event("checkpoint_damaged", message=message)
        self._load(state)
        self.link.event("resume", step=step, source="checkpoint")

    def _snapshot(self) -> TrainState:
        return replace(self.learner.state(), progress=self.progress.to_json())

    def _load(self, state: TrainState) -> None:
        self.learner.load(state)
        self.progress = Progress.from_json(state.progress)

    # ---- steps ----

    def _step(self, leaving: bool) -> list[int]:
        """Takes one step on all workers; returns the flags of all of them. `leaving` tells that this one goes after it."""
        train, signals, progress = self.job.train, self.link.signals, self.progress
        if signals.abort:
            raise PeerLost("the run is over")
        rows, place = self._rows(progress.step), owned_shards(self._group.rank, self._group.world_size, self.job.num_shards)
        mine = slice(shard_rows(len(rows), self.job.num_shards, place[0]).start, shard_rows(len(rows), self.job.num_shards, place[-1]).stop)
        reader = self._reader(self._split)
        x, y = reader.rows(rows[mine])
        if progress.step + 1 < (progress.epoch + 1) * self._steps:
            upcoming = self._rows(progress.step + 1)
            first, last = shard_rows(len(upcoming), self.job.num_shards, place[0]), shard_rows(len(upcoming), self.job.num_shards, place[-1])
            reader.prefetch(upcoming[first.start : last.stop])
        flags = [int(signals.join), int(leaving), int(signals.checkpoint), int(signals.stop)]
        lr = learning_rate(
            self.job.optimizer.schedule, self.job.optimizer.lr, progress.step, train.epochs * self._steps, self.job.optimizer.warmup_steps
        )

        def shard(number: int) -> Shard:
            part = shard_rows(len(rows), self.job.num_shards, number)
            inside = slice(part.start - mine.start, part.stop - mine.start)
            return self.learner.shard(x[inside], y[inside], shard_seed([train.seed, progress.epoch, progress.step, number]))

        if train.reduction == "fast":
            total = self._fast_reduce(x, y, len(rows), flags, place[0])
        else:
            total = self._reducer.reduce(shard, len(rows), min(len(rows), self.job.num_shards), flags)
        self._refuse_nan(total)
        if train.reduction == "fast":
            self.learner.fast_apply(lr)  # type: ignore[attr-defined]
        else:
            self.learner.apply(total.mean, total.counters, lr)
        progress.add_step(total.loss, total.correct, len(rows))
        self._record("step", lr, {"loss": total.loss / len(rows), "accuracy": total.correct / len(rows)})
        return total.flags

    def _fast_reduce(self, x: np.ndarray, y: np.ndarray, num_rows: int, flags: list[int], first_shard: int) -> Total:
        """The framework's own step: gradients are reduced while they are computed, then one small vector carries the rest."""
        seed = shard_seed([self.job.train.seed, self.progress.epoch, self.progress.step, first_shard])
        with collective():
            scores = self.learner.fast_shard(x, y, seed, num_rows)  # type: ignore[attr-defined]
            vector = torch.cat([scores.cpu(), torch.tensor(flags, dtype=torch.float64)])
            if self._group.world_size > 1:
                dist.all_reduce(vector)
        loss, correct, *sums = vector.tolist()
        return Total(torch.empty(0), torch.empty(0, dtype=torch.int64), loss, round(correct), [int(f > 0) for f in sums])

    def _refuse_nan(self, total: Total) -> None:
        """Stops before a step that is not finite is applied, so that no replica and no checkpoint ever holds it."""
        if not np.isfinite(total.loss) or not bool(torch.isfinite(total.mean).all()):
            what = "loss" if not np.isfinite(total.loss) else "gradient"
            raise TrainingError(
                f"the {what} is not finite at step {self.progress.step} of epoch {self.progress.epoch + 1} (loss {total.loss}); "
                "the step was not applied. Lower optimizer.lr, set train.clip_norm, or check the data"
            )

    def _rows(self, step: int) -> np.ndarray:
        """Row ids of the global batch of `step`."""
        epoch, size = step // self._steps, self.job.train.global_batch_size
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self._split, self.job.train.seed, epoch, self.job.data.order)
        start = (step - epoch * self._steps) * size
        return self._order[1][start : start + size]

    def _reader(self, split: Split) -> Reader:
        """One reader a set of blocks, which train and validation rows may share."""
        return self._readers.setdefault(id(split.blocks), Reader(split.blocks))

    def _record(self, kind: str, lr: float, metrics: Metrics) -> None:
        self.link.clock = self.progress.clock
        ended = kind == "epoch"
        self.link.record(
            {
                "kind": kind,
                "epoch": self.progress.epoch + (not ended),
                "step": self.progress.step,
                "samples": self.progress.samples,
                **metrics,
                "lr": lr,
                "workers": self._group.world_size,
                "time": time.time(),
            }
        )

    # ---- epochs ----

    def _at_epoch_end(self) -> bool:
        return self.progress.step == (self.progress.epoch + 1) * self._steps

    def _end_epoch(self) -> None:
        """Validates, closes the epoch and checkpoints it."""
        validation = self._worker.dataset.validation
        scores = {f"val_{name}": value for name, value in self._evaluate(validation).items()} if validation is not None else {}
        if not all(np.isfinite(value) for value in scores.values()):
            raise TrainingError(
                f"the validation loss is not finite after epoch {self.progress.epoch + 1} ({scores}); "
                "lower optimizer.lr or check the data"
            )
        metrics = self.progress.end_epoch(scores, self.job)
        self._record("epoch", self._last_lr(), metrics)
        self._checkpoint(metrics)

    def _last_lr(self) -> float:
        rule = self.job.optimizer
        return learning_rate(rule.schedule, rule.lr, self.progress.step - 1, self.job.train.epochs * self._steps, rule.warmup_steps)

    def _evaluate(self, split: Split) -> Metrics:
        """Exact loss and accuracy over all rows of a split; each row counts once, and the bits do not depend on the workers."""
        reader = self._reader(split)
        nothing = torch.empty(0, device=self.learner.device)

        def shard(number: int) -> Shard:
            ids = split.ids[shard_rows(len(split), self.job.num_shards, number)]
            scores = torch.zeros(NUM_SCORES, dtype=torch.float64, device=self.learner.device)
            for start in range(0, len(ids), EVALUATION_ROWS):
                scores += self.learner.evaluate(*reader.rows(ids[start : start + EVALUATION_ROWS]))
            return Shard(nothing, nothing.long(), scores)

        total = self._scorer.reduce(shard, len(split), 1, [0, 0, 0, 0])
        return {"loss": total.loss / len(split), "accuracy": total.correct / len(split)}

    # ---- checkpoints and the end ----

    def _checkpoint(self, metrics: Metrics | None = None) -> None:
        if self._group.rank == 0:
            self._saver.save(self.progress.step, self._snapshot(), metrics or {})

    def _finish(self, status: str) -> None:
        """Tests the final weights, makes sure the last checkpoint is on storage, and says goodbye."""
        if status == "stopped":
            self._checkpoint()
        test = self._worker.dataset.test
        tested = self._evaluate(test) if test is not None and status != "stopped" else {}
        self._saver.drain()
        metrics = self.progress.metrics
        self.link.done(
            {
                "status": status,
                "epochs": self.progress.epoch,
                "steps": self.progress.step,
                "samples": self.progress.samples,
                "train_loss": metrics.get("loss"),
                "val_loss": metrics.get("val_loss"),
                "val_accuracy": metrics.get("val_accuracy"),
                "test_loss": tested.get("loss"),
                "test_accuracy": tested.get("accuracy"),
                "weights_sha256": weights_sha256(self.learner.weights()),
            }
        )
