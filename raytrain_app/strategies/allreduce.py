"""The synchronous strategy: one generation of workers, the same step on all of them, in place through every change.

`AllReduce.run` is the whole life of a worker: form a generation, take over the leader's state if behind, train until
somebody comes, goes or is lost, and again. All decisions below are functions of values that every worker holds equal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from raytrain_app.data import Split
from raytrain_app.elastic.exchange import PeerLost, broadcast_bytes
from raytrain_app.elastic.group import Group
from raytrain_app.elastic.plan import filled_shards, learning_rate, owned_shards, shard_rows, shard_seed, training_rows
from raytrain_app.elastic.progress import Metrics, Progress
from raytrain_app.elastic.reduce import Layout, Ready, Reducer, Shard, Total
from raytrain_app.elastic.roster import Generation
from raytrain_app.elastic.vault import VaultKeeper
from raytrain_app.errors import TrainingError
from raytrain_app.learners.base import FastLearner
from raytrain_app.state import TrainState, weights_sha256
from raytrain_app.storage.checkpoints import CheckpointStore
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.saver import Saver
from raytrain_app.strategies.batches import Batch, Batches
from raytrain_app.strategies.hooks import Hooks
from raytrain_app.strategies.worker import Worker

JOIN, LEAVE, CHECKPOINT, STOP = range(NUM_FLAGS := 4)
"""Places of the control flags in the reduced buffer."""
EVALUATION_ROWS = 250
"""Rows of one forward pass in evaluation. A constant, since kernels may round differently for other sizes."""


def train(worker: Worker) -> None:
    """Entry of a worker of `strategy: allreduce`."""
    AllReduce(worker).run()


class AllReduce:
    """One worker's training. Methods that reduce are called by all members of the generation, in the same order."""

    _parts: Mapping[str, int] | None = None
    """Into how many parts a replica is cut each way; None: each worker holds a whole one."""

    def __init__(self, worker: Worker) -> None:
        self.job, self.learner, self.link = worker.job, worker.learner, worker.link
        self._fast_learner = cast(FastLearner, worker.learner)
        self._worker = worker
        self._leaving = False
        self._batches = Batches(self.job, worker.dataset.train)
        self._steps = self._batches.num_steps
        self._store = CheckpointStore(
            Folder.open(worker.directory).child("checkpoints"),
            self.job.checkpoint.keep,
            self.job.checkpoint.monitor,
            self.job.checkpoint.mode,
        )
        self._saver = Saver(self._store, self.link.event)
        self._keeper = self._make_keeper()
        self._hooks = Hooks(worker.learner, self._steps)
        self.progress = Progress()

    # ---- generations ----

    def run(self) -> None:
        """Trains until the run is over for this worker."""
        try:
            self._go_through_generations()
        finally:  # whatever the end, a checkpoint under way is finished
            self._saver.drain()

    def _go_through_generations(self) -> None:
        failures = 0
        while (generation := self.link.join()) is not None:
            group = Group(generation, 2 * self.job.failure.heartbeat_s, self.learner.device, self._parts)
            self.link.group = group
            try:
                # A member that dies while all connect shows only by not coming; who is slow gets more time the next time.
                failures += 1
                group.connect(min(2.0**failures, self.job.failure.heartbeat_s))
                failures = 0
                if self._train(group):
                    break
                self.link.stopwatch.switch("idle")
            except PeerLost:
                self.link.stopwatch.switch("idle", book="redone")
            finally:
                group.close()

    def _train(self, group: Group) -> bool:
        """Trains in one generation. True when this worker is done, False when another generation is to be formed."""
        self._take_over(group)
        self._group = group
        self._shards = owned_shards(group.replica, group.num_replicas, self.job.num_shards)
        self._reducer = self._make_reducer(group, self.learner.layout)
        self._scorer = self._make_reducer(group, Layout(num_scores=self.learner.layout.num_scores))
        if self.job.train.reduction == "fast":
            self._fast_learner.connect(group.world_size, NUM_FLAGS)
        self._hooks.start(group)
        self.link.stopwatch.switch("useful")
        while not self.progress.finished(self.job):
            if self._at_epoch_end():
                self._end_epoch()
                continue
            self._hooks.epoch_begins(self.progress)
            flags = self._step().flags
            if flags[STOP]:
                self._finish("stopped")
                return True
            if self._keeper is not None and self._snapshot_is_due():
                self._keeper.send(self._snapshot)
            # The end of an epoch is checkpointed after its validation.
            if flags[CHECKPOINT] or (self.progress.step % self.job.checkpoint.every_steps == 0 and not self._at_epoch_end()):
                self._checkpoint()
            if flags[LEAVE] or flags[JOIN]:
                group.part()
                if self._leaving:
                    self._hand_over()
                return False
        self._finish("early_stopped" if self.progress.stopped_early else "finished")
        return True

    def _make_reducer(self, group: Group, layout: Layout) -> Reducer:
        shards, device = self.job.num_shards, self.learner.device
        return Reducer(group.replica, group.num_replicas, shards, layout, NUM_FLAGS, device, group.counterparts)

    def _make_keeper(self) -> VaultKeeper | None:
        return VaultKeeper(self._worker.vault) if self._worker.vault is not None else None

    def _take_over(self, group: Group) -> None:
        """Brings members that are behind to the leader's state; a leader without state restores the newest or starts."""
        generation: Generation = group.generation
        if generation.leader_clock < 0 and generation.rank == 0:
            self._restore()
            self.link.clock = self.progress.clock  # should the others be lost now, this one has state
        if generation.behind and generation.rank in (0, *generation.behind):
            mine = self._snapshot().to_bytes() if generation.rank == 0 else None
            data = broadcast_bytes(mine, 0, receivers=generation.behind)
            if generation.rank in generation.behind:
                self._load(TrainState.from_bytes(data))
        self.link.clock = self.progress.clock

    def _restore(self) -> None:
        """Goes on from the vault's snapshot or the newest good checkpoint on storage, whichever is further."""
        clock = self._keeper.newest() if self._keeper is not None else None
        kept = self._keeper.get(clock) if self._keeper is not None and clock is not None else None
        if kept is not None and kept.progress["step"] >= max(self._store.steps(), default=0):
            self._load(kept)
            self._tell_resume("memory")
            return
        found = self._store.load("latest")
        if found is not None:
            state, _, messages = found
            for message in messages:
                self.link.event("checkpoint_damaged", message=message)
            self._load(state)
            self._tell_resume("checkpoint")

    def _tell_resume(self, source: str) -> None:
        self.link.event("resume", step=self.progress.step, samples=self.progress.samples, source=source)

    def _snapshot(self) -> TrainState:
        return replace(self.learner.state(), progress=self.link.with_unrecorded(self.progress.to_json()))

    def _load(self, state: TrainState) -> None:
        self.learner.load(state)
        self.progress = Progress.from_json(self.link.take_up(state.progress))

    def _hand_over(self) -> None:
        """Leaves; if all leave at once, the newest state is safe before they do."""
        if self._group.replica == 0 and self._keeper is not None:
            self._keeper.put(self._snapshot())
        self.link.leave()

    # ---- steps ----

    def _step(self) -> Total:
        """Takes one step on all workers."""
        if self.link.signals.abort:
            raise PeerLost("the run is over")
        signals, progress = self.link.signals, self.progress
        self._leaving = signals.leave  # the others are told that this worker goes after the step
        batch = self._batches.read(progress.step, self._shards)
        flags = [int(signals.join), int(self._leaving), int(signals.checkpoint), int(signals.stop)]
        # A batch too small to give every worker rows takes the exact way, which bears empty shards.
        filled = filled_shards(len(batch.rows), self.job.num_shards)
        fast = self.job.train.reduction == "fast" and filled == self.job.num_shards
        reduce = self._reduce_fast if fast else self._reduce_exact
        total = reduce(batch, flags, batch.mine.tolist() if self.job.audit else None)
        self._commit(total, lambda: self._apply(total, len(batch.rows), fast))
        return total

    def _commit(self, total: Total, apply: Callable[[], None]) -> None:
        """Ends a step or an epoch with what all workers have summed up in `total`."""
        apply()

    def _apply(self, total: Total, size: int, fast: bool) -> None:
        """Takes over the step of a batch of `size` rows."""
        progress = self.progress
        self._refuse_nan(total)
        self._hooks.batch_begins(progress.step)
        lr = self._learning_rate(progress.step)
        if fast:
            self._fast_learner.fast_apply(lr)
        else:
            self.learner.apply(total.mean, total.counters, lr)
        progress.add_step(total.loss, total.correct, size, total.extra)
        metrics = {"loss": total.loss / size, "accuracy": total.correct / size}
        self._record("step", lr, metrics, total.rows)
        self._hooks.batch_ends(progress.step - 1, metrics, progress)
        self.link.stopwatch.switch("useful")

    def _reduce_exact(self, batch: Batch, flags: list[int], told: list[int] | None) -> Total:
        progress, num_rows, num_shards = self.progress, len(batch.rows), self.job.num_shards

        def shard(number: int, ready: Ready | None) -> Shard:
            part = training_rows(num_rows, num_shards, number)
            inside = slice(part.start - batch.first, part.stop - batch.first)
            seed = shard_seed([self.job.train.seed, progress.epoch, progress.step, number])
            return self.learner.shard(batch.x[inside], batch.y[inside], seed, ready)

        return self._reducer.reduce(shard, num_rows, filled_shards(num_rows, num_shards), flags, told)

    def _reduce_fast(self, batch: Batch, flags: list[int], told: list[int] | None) -> Total:
        """The framework's own step: gradients are reduced while they are computed."""
        seed = shard_seed([self.job.train.seed, self.progress.epoch, self.progress.step, self._shards[0]])
        sums = self._fast_learner.fast_shard(batch.x, batch.y, seed, len(batch.rows), flags)
        rows = self._group.gather_ints(told, len(batch.rows)) if told is not None else []
        loss, correct, *extra = sums[: -len(flags)]
        nothing = torch.empty(0)
        return Total(nothing, nothing.long(), loss, correct, [int(total > 0) for total in sums[-len(flags) :]], rows, extra)

    def _refuse_nan(self, total: Total) -> None:
        """Stops before a step that is not finite is applied, so that no replica and no checkpoint ever holds it."""
        # Buffers may well hold infinities, such as an attention mask.
        gradient = total.mean[: self.learner.layout.num_parameters]
        if not math.isfinite(total.loss) or not _is_finite(gradient):
            what = "loss" if not math.isfinite(total.loss) else "gradient"
            raise TrainingError(
                f"the {what} is not finite at step {self.progress.step + 1} of epoch {self.progress.epoch + 1} "
                f"(loss {total.loss}); "
                "the step was not applied. Lower optimizer.lr, set train.clip_norm, or check the data"
            )

    def _record(self, kind: str, lr: float, metrics: Metrics, rows: Sequence[int] = ()) -> None:
        """Hands a line of metrics.jsonl to the link; with audit, the ids of the rows applied travel with it."""
        self.link.clock = self.progress.clock
        record = {
            "kind": kind,
            "epoch": self.progress.epoch + (kind == "step"),
            "step": self.progress.step,
            "samples": self.progress.samples,
            **metrics,
            "lr": lr,
            "workers": self._group.world_size,
            "time": time.time(),
        }
        self.link.record({**record, "ids": rows} if rows else record)

    # ---- epochs ----

    def _at_epoch_end(self) -> bool:
        return self.progress.step == (self.progress.epoch + 1) * self._steps

    def _end_epoch(self) -> None:
        """Validates, closes the epoch and checkpoints it."""
        validation = self._worker.dataset.validation
        if validation is None:
            self._close_epoch({})
        else:
            self._hooks.validation_begins()
            total = self._evaluate(validation)
            self._commit(total, lambda: self._close_epoch(self._scores(total, validation)))
        try:
            self._hooks.epoch_ends(self.progress)
        finally:
            self._checkpoint(self.progress.metrics)

    def _close_epoch(self, validated: Metrics) -> None:
        """Closes the epoch with the metrics of the validation."""
        if validated:
            self._hooks.validation_ends(validated)
        scores = {f"val_{name}": value for name, value in validated.items()}
        if not np.isfinite(scores.get("val_loss", 0.0)):
            raise TrainingError(
                f"the validation loss is not finite after epoch {self.progress.epoch + 1} ({scores}); "
                "lower optimizer.lr or check the data"
            )
        metrics = self.progress.end_epoch({**self.learner.metrics(self.progress.extra), **scores}, self.job)
        self._record("epoch", self._learning_rate(self.progress.step - 1), metrics)

    def _learning_rate(self, step: int) -> float:
        if self._hooks.lr is not None:
            return self._hooks.lr
        rule = self.job.optimizer
        return learning_rate(rule.schedule, rule.lr, step, self.job.train.epochs * self._steps, rule.warmup_steps)

    def _scores(self, total: Total, split: Split) -> Metrics:
        own = self.learner.metrics(total.extra)
        return {"loss": total.loss / len(split), "accuracy": total.correct / len(split), **own}

    def _evaluate(self, split: Split) -> Total:
        """Exact loss and accuracy over all rows of a split; each row counts once, and the bits do not depend on the workers."""
        if self.job.train.reduction == "fast":
            self._fast_learner.share_buffers()
        reader = self._batches.reader(split)
        nothing = torch.empty(0, device=self.learner.device)

        def shard(number: int, ready: Ready | None) -> Shard:
            ids = split.ids[shard_rows(len(split), self.job.num_shards, number)]
            scores = torch.zeros(self.learner.layout.num_scores, dtype=torch.float64, device=self.learner.device)
            for start in range(0, len(ids), EVALUATION_ROWS):
                scores += self.learner.evaluate(*reader.rows(ids[start : start + EVALUATION_ROWS]))
            return Shard(nothing, nothing.long(), scores)

        return self._scorer.reduce(shard, len(split), 1, [0, 0, 0, 0])

    # ---- checkpoints and the end ----

    def _snapshot_is_due(self) -> bool:
        return self._group.rank == 0 and self._keeper is not None and self._keeper.due()

    def _checkpoint(self, metrics: Metrics | None = None) -> None:
        if self._group.rank == 0:
            self._saver.save(self.progress.step, self._snapshot, metrics or {})

    def _finish(self, status: str) -> None:
        """Tests the final weights, makes sure the last checkpoint is on storage, and says goodbye."""
        self._group.part()
        weights = self.learner.weights()
        if not all(np.isfinite(array).all() for array in weights.values()):
            raise TrainingError(f"the weights are not finite after step {self.progress.step}; lower optimizer.lr")
        if status == "stopped":
            self._checkpoint()
        else:
            self._hooks.training_ends(self.progress)
        test = self._worker.dataset.test
        tested: Metrics = {}
        if test is not None and status != "stopped":
            total = self._evaluate(test)
            self._commit(total, lambda: tested.update(self._scores(total, test)))
        metrics = self.progress.metrics
        summary = {
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
        self._saver.drain()
        if self._group.rank == 0 and self.learner.own_file is not None and status != "stopped":
            self._export(self.learner.own_file)
        self.link.done(summary)

    def _export(self, name: str) -> None:
        """Saves the best model in the framework's own format too, beside its checkpoint; the learner is of no use after it."""
        found = self._store.load("best") or self._store.load("latest")
        if found is None:
            return
        state, step, _ = found
        self.learner.load(state)
        try:
            self._store.attach(step, name, self.learner.export())
        except Exception as error:  # a model's own code may not bear to be saved; its checkpoint is there all the same
            self.link.event("export_failed", file=name, error=f"{type(error).__name__}: {error}")


def _is_finite(vector: torch.Tensor) -> bool:
    """Whether all elements are."""
    # The sum of their squares is known in a fraction of the time. It overflows for large values: then each is looked at.
    return math.isfinite(torch.dot(vector, vector)) or all(map(math.isfinite, torch.stack(torch.aminmax(vector)).tolist()))
