"""TensorFlow's own strategies: the step runs in tf.distribute, everything around it in the engine.

tf.distribute works with tf_keras; Keras 3 does not train under it. So each worker has two models with the same weights: a
tf_keras one under the strategy, which trains, and a Keras 3 one, which is scored, saved, and shown to callbacks. Their
weights are matched by order and shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist

from raytrain_app.elastic.exchange import PeerLost, collective, gather, sums_of_all
from raytrain_app.elastic.reduce import Ready, Shard
from raytrain_app.errors import JobError, TrainingError
from raytrain_app.job import Job
from raytrain_app.learners import keras_parts as parts
from raytrain_app.learners.keras import KerasLearner, seed_pair, size_of
from raytrain_app.learners.keras_callbacks import PREFIX, KerasCallbacks
from raytrain_app.learners.tensorflow_process import describe, import_tf_keras, local_devices
from raytrain_app.state import Arrays, TrainState, check_names
from raytrain_app.task import Task

LOST = (tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.InternalError, tf.errors.UnavailableError)
"""What a step raises when another worker is gone."""


class DistributedLearner(KerasLearner):
    """See the module and `learners.base.FastLearner`. What is inherited is the Keras 3 model, which does not train."""

    def __init__(self, job: Job, task: Task, directory: str | None) -> None:
        """Waits for all workers of the strategy, then builds both models."""
        keras = import_tf_keras()
        kind = getattr(job.strategy, "tf_distribute", None)
        self._strategy = make_strategy(str(kind))  # before any other operation, as multi-worker strategies demand
        self._num_workers = self._strategy.cluster_resolver.cluster_spec().num_tasks("worker") if kind == MULTI_WORKER else 1
        self._num_replicas = self._strategy.num_replicas_in_sync // self._num_workers
        super().__init__(job, task, directory)
        with self._strategy.scope():
            self._replicated = build_replicated(keras, task, job, self.model)
            self._rule, _ = parts.make_optimizer(keras, task, job)
            self._rule.build(self._replicated.trainable_variables)
        theirs = dict(zip(map(id, self.model.weights), self._replicated.weights, strict=True))
        self._twins = {name: theirs[id(v)] for name, v in self.named.items()}
        self._rule_state = {v.name.removesuffix(":0").replace("/", "."): v for v in self._rule.variables}
        self._run_step = tf.function(self._step, reduce_retracing=True)
        self._run_update = tf.function(self._update)
        self._connected, self._error = False, ""
        self.push()

    def make_callbacks(self, *arguments: Any) -> KerasCallbacks:
        return SyncedCallbacks(self, *arguments)

    # ---- training ----

    def connect(self, world_size: int, num_flags: int) -> None:
        if self._connected:
            raise TrainingError(f"a step of tf.distribute failed though no worker was lost: {self._error}")
        self._connected = True
        if world_size != self._num_workers:
            raise TrainingError(f"tf.distribute was started with {self._num_workers} workers, and {world_size} came to train")
        versions: list[Any] = [None] * world_size
        if world_size > 1:
            with collective():
                dist.all_gather_object(versions, describe(fast=True))
        if any(version != versions[0] for version in versions):
            raise TrainingError(f"tf.distribute needs the same versions on all workers; found {versions}")

    def fast_shard(self, x: np.ndarray, y: np.ndarray, seed: int, num_rows: int, flags: Sequence[float]) -> list[float]:
        # Each replica gets a row at least; one that is there for that alone weighs nothing.
        pieces = np.array_split(np.arange(max(len(y), self._num_replicas)), self._num_replicas)

        def part(context: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            piece = pieces[context.replica_id_in_sync_group % self._num_replicas]
            rows = piece % len(y)
            return tf.constant(x[rows]), tf.constant(y[rows]), tf.constant((piece < len(y)).astype(np.float32))

        batch = self._strategy.experimental_distribute_values_from_function(part)
        with self._peers_watched():
            self._gradients, scores = self._run_step(batch, seed_pair(seed, -1), 1.0 / num_rows)
            own = torch.from_numpy(scores.numpy())
        return sums_of_all(torch.cat([own, own.new_tensor(flags)]), self._num_workers)

    def fast_apply(self, lr: float) -> None:
        with self._peers_watched():
            self._run_update(self._gradients, lr)
        self._note_step(lr)

    def share_buffers(self) -> None:
        """All replicas' buffers become their mean over all workers; the Keras 3 model gets them and the weights."""
        buffers = [self._twins[name] for name in (*self._buffers, *self._counters)]
        for variable in buffers:
            mean = torch.from_numpy(np.mean([part.numpy() for part in self._parts(variable)], axis=0, dtype=np.float64))
            if self._num_workers > 1:
                mean = gather(mean).mean(0)
            self._write(variable, mean.numpy())
        self.pull()

    def _step(self, batch: Any, seed: tf.Tensor, factor: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """Forward and backward on all replicas; the reduced gradients, and the scores of this worker's rows."""
        gradients, losses, outputs = self._strategy.run(self._replica_step, (*batch, seed, factor))
        local = self._strategy.experimental_local_results
        counted = tf.concat(local(batch[2]), 0) > 0
        y, rows = tf.concat(local(batch[1]), 0)[counted], tf.concat(local(outputs), 0)[counted]
        return gradients, self._scores(y, rows, tf.add_n(local(losses)))

    def _replica_step(
        self, x: tf.Tensor, y: tf.Tensor, weights: tf.Tensor, seed: tf.Tensor, factor: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        context = tf.distribute.get_replica_context()
        own_seed = seed + tf.stack([0, tf.cast(context.replica_id_in_sync_group, tf.int32)])
        with tf.GradientTape() as tape:
            outputs = self._replicated(self._task.keras_augment(self._task.keras_inputs(x), own_seed), training=True)
            outputs = tf.cast(outputs, tf.float32)
            loss = tf.reduce_sum(self._row_losses(y, outputs) * weights)
            for extra in self._replicated.losses:
                loss += tf.cast(extra, loss.dtype) * tf.reduce_sum(weights)
            share = loss * factor
        variables = self._replicated.trainable_variables
        gradients = tape.gradient(share, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        return context.all_reduce(tf.distribute.ReduceOp.SUM, dense), loss, outputs

    def _update(self, gradients: Any, lr: tf.Tensor) -> None:
        self._rule.learning_rate = lr
        self._strategy.run(self._replica_update, (gradients,))

    def _replica_update(self, gradients: list[tf.Tensor]) -> None:
        variables = self._replicated.trainable_variables
        if self._clip_norm is not None:
            factor = tf.minimum(self._clip_norm / (tf.linalg.global_norm(gradients) + 1e-6), 1.0)
            gradients = [gradient * factor for gradient in gradients]
        if self._decay:
            gradients = [g + self._decay * v for g, v in zip(gradients, variables, strict=True)]
        self._rule.apply_gradients(zip(gradients, variables, strict=True), skip_gradients_aggregation=True)

    @contextmanager
    def _peers_watched(self) -> Iterator[None]:
        try:
            yield
        except LOST as error:
            self._error = " ".join(str(error).split())[:300]
            raise PeerLost(self._error) from error

    # ---- the exact step, for a batch with fewer rows than workers ----

    def shard(self, x: np.ndarray, y: np.ndarray, seed: int, ready: Ready | None = None) -> Shard:
        self.pull()
        return super().shard(x, y, seed)

    def apply(self, mean: torch.Tensor, counters: torch.Tensor, lr: float) -> None:
        gradient, buffers = np.split(mean.numpy(), [self.layout.num_parameters])
        ends = np.cumsum([size_of(v) for v in self._trained])[:-1]
        pieces = zip(np.split(gradient, ends), self._trained, strict=True)
        self._run_update([tf.constant(piece.reshape(v.shape)) for piece, v in pieces], lr)
        self._assign(self._buffers.values(), tf.constant(buffers))
        self._assign(self._counters.values(), tf.constant(counters.numpy()))
        for name, ours in {**self._buffers, **self._counters}.items():
            self._write(self._twins[name], ours.numpy())
        self._note_step(lr)

    def _note_step(self, lr: float) -> None:
        """Keeps up the optimizer that callbacks see."""
        self.optimizer.learning_rate = lr
        self.optimizer.iterations.assign_add(1)

    # ---- state ----

    def pull(self) -> None:
        """The Keras 3 model takes over what was trained."""
        for name, ours in self.named.items():
            ours.assign(self._read_twin(name))

    def push(self) -> None:
        """All replicas take over the Keras 3 model."""
        for name, ours in self.named.items():
            self._write(self._twins[name], ours.numpy())

    def state(self) -> TrainState:
        buffers = {name: self._read_twin(name) for name in (*self._buffers, *self._counters)}
        rule = {name: np.array(self._parts(v)[0].numpy()) for name, v in self._rule_state.items()}
        return TrainState(self.weights(), buffers, {**rule, **self.callbacks.state()})

    def load(self, state: TrainState) -> None:
        rule = {name: array for name, array in state.optimizer.items() if not name.startswith(PREFIX)}
        check_names("optimizer state", {name: tuple(v.shape) for name, v in self._rule_state.items()}, rule)
        callbacks = {name: array for name, array in state.optimizer.items() if name.startswith(PREFIX)}
        super().load(TrainState(state.weights, state.buffers, callbacks))
        self.push()
        for name, variable in self._rule_state.items():
            self._write(variable, rule[name])

    def weights(self) -> Arrays:
        return {name: self._read_twin(name) for name in self._weights}

    def _read_twin(self, name: str) -> np.ndarray:
        return np.array(self._parts(self._twins[name])[0].numpy())

    def _parts(self, variable: Any) -> tuple[Any, ...]:
        """A variable's copies on this worker. Read one by one, they wait for no other worker."""
        return tuple(self._strategy.experimental_local_results(variable))

    def _write(self, variable: Any, value: np.ndarray) -> None:
        for part in self._parts(variable):
            part.assign(tf.cast(value, part.dtype))


class SyncedCallbacks(KerasCallbacks):
    """Callbacks that see the Keras 3 model as trained so far, and whose changes to it reach all replicas."""

    def __init__(self, learner: DistributedLearner, *arguments: Any) -> None:
        self._learner = learner
        super().__init__(*arguments)

    def run(self, hook: str, *arguments: Any) -> None:
        if "batch" in hook and not self.reads_weights_in_batches:
            super().run(hook, *arguments)
            return
        self._learner.pull()
        super().run(hook, *arguments)
        if "batch" not in hook:
            self._learner.push()


MULTI_WORKER = "multi_worker_mirrored"


def make_strategy(kind: str) -> Any:
    """The strategy of `strategy.tf_distribute`, on the devices of this worker."""
    if kind == MULTI_WORKER:  # it must come before TensorFlow looks for devices
        return tf.distribute.MultiWorkerMirroredStrategy()
    devices = local_devices()
    if kind == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    if kind == "central_storage":
        return tf.distribute.experimental.CentralStorageStrategy(devices, "/device:CPU:0")
    return tf.distribute.OneDeviceStrategy(devices[0])


def build_replicated(keras: Any, task: Task, job: Job, twin: Any) -> Any:
    """The task's model, built with tf_keras; to be called in the strategy's scope.

    Raises:
        JobError: it cannot be built with tf_keras, or its weights are not those of the Keras 3 model.
    """
    if job.train.precision == "bf16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = task.keras_model(keras, job.model.name, task.models[job.model.name](**job.model.options))
    if not isinstance(model, keras.Model):
        raise JobError(
            f"keras_model: returned a {type(model).__module__}.{type(model).__name__}; tf.distribute needs a model of tf_keras, "
            "so build it with the argument keras, or train with reduction: exact, which takes Keras 3"
        )
    model(task.keras_inputs(tf.zeros((1, *task.columns.shape), task.columns.dtype)))
    ours, theirs = [tuple(v.shape) for v in twin.weights], [tuple(v.shape) for v in model.weights]
    if ours != theirs:
        raise JobError(f"keras_model: with tf_keras its weights have the shapes {theirs}, with Keras 3 {ours}; expected the same")
    return model
