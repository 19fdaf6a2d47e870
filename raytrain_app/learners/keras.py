"""The Keras learner: a Keras 3 model on TensorFlow, its optimizer, and one traced function for a shard.

The gradient of a shard leaves TensorFlow as one flat vector, and the mean gradient of a step comes back as one. What is
between, the exact sum over workers, is the engine's and has nothing of TensorFlow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch.utils.dlpack import from_dlpack

from raytrain_app.elastic.plan import shard_seed
from raytrain_app.elastic.reduce import NUM_SCORES, Layout, Ready, Shard
from raytrain_app.errors import JobError
from raytrain_app.job import Job
from raytrain_app.learners import keras_parts as parts
from raytrain_app.learners.keras_callbacks import PREFIX, KerasCallbacks
from raytrain_app.learners.tensorflow_process import import_keras
from raytrain_app.state import Arrays, TrainState, check_names
from raytrain_app.task import Columns, Task

SAMPLE_ROWS = 8
"""Rows that the model is tried with before training."""


class KerasLearner:
    """See `learners.base.Learner`. Gradients are summed on the host, so workers with GPUs need no NCCL beside TensorFlow's.

    Weights are all variables that layers made as trainable, frozen ones too. What layers keep beside them (statistics of
    BatchNorm) are the buffers. The states of Keras's random generators are neither: each shard sets them from its seed.

    Attributes:
        model: the Keras model, compiled with `optimizer`.
        named: all its weights and buffers by name.
    """

    own_file = "model.keras"

    def __init__(self, job: Job, task: Task, directory: str | None = None) -> None:
        """Builds the model from the job's seed alone, so that all replicas start equal.

        Args:
            job: what is trained.
            task: gives the model and all that goes with it.
            directory: URI of the run directory, below which callbacks write; None where nothing is trained.
        """
        keras = import_keras()
        self.device = torch.device("cpu")
        self._task, self._clip_norm = task, job.train.clip_norm
        self.model = build_model(keras, task, job)
        self.named = variable_names(self.model)
        self._trained = list(self.model.trainable_weights)
        # TensorFlow's own variable still tells whether a layer made it trainable, also where the layer was frozen later.
        self._weights = {name: v for name, v in self.named.items() if v.value.trainable}
        others = {name: v for name, v in self.named.items() if not v.value.trainable}
        self._buffers = {name: v for name, v in others.items() if tf.as_dtype(v.dtype).is_floating}
        self._counters = {name: v for name, v in others.items() if tf.as_dtype(v.dtype).is_integer}
        dtype = _flat_dtype(self._trained, self._buffers)
        self.optimizer, self._decay = parts.make_optimizer(keras, task, job)
        self.optimizer.build(self._trained)
        self._slots = _slot_names(self.optimizer, {v.path: name for name, v in self._weights.items()})
        sample = _sample_labels(task.columns), self._predict(_sample_rows(task.columns), False)
        loss, self._row_losses = parts.make_loss(keras, task, sample)
        self._metrics = parts.compile_model(keras, task, self.model, self.optimizer, loss, sample)
        self.layout = Layout(
            sum(size_of(v) for v in self._trained),
            sum(size_of(v) for v in self._buffers.values()),
            sum(size_of(v) for v in self._counters.values()),
            dtype,
            NUM_SCORES + sum(size_of(v) for metric in self._metrics for v in metric.variables),
        )
        self._dtype = tf.as_dtype(str(dtype).removeprefix("torch."))
        self.callbacks = self.make_callbacks(partial(task.keras_callbacks, keras), keras, self.model, job, directory)
        self._trace()

    def make_callbacks(self, *arguments: Any) -> KerasCallbacks:
        """The task's callbacks; `arguments` are those of `KerasCallbacks`."""
        return KerasCallbacks(*arguments)

    # ---- training ----

    def shard(self, x: np.ndarray, y: np.ndarray, seed: int, ready: Ready | None = None) -> Shard:
        if len(y) == 0:
            counters = torch.zeros(self.layout.num_counters, dtype=torch.int64)
            scores = torch.zeros(self.layout.num_scores, dtype=torch.float64)
            return Shard(torch.zeros(self.layout.size, dtype=self.layout.dtype), counters, scores)
        _seed_states(self._generators, seed)
        flat, counters, scores = self._shard(x, y, seed_pair(seed, -1))
        return Shard(from_dlpack(flat), from_dlpack(counters), from_dlpack(scores))

    def apply(self, mean: torch.Tensor, counters: torch.Tensor, lr: float) -> None:
        self._apply(mean.numpy(), counters.numpy(), lr)

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
        _seed_states(self._evaluation_generators, 0)
        return from_dlpack(self._evaluate(x, y))

    def outputs(self, x: np.ndarray) -> np.ndarray:
        _seed_states(self._evaluation_generators, 0)
        return np.asarray(self._predict(tf.constant(x), False), np.float32)

    def _trace(self) -> None:
        """Traces the functions once, for any number of rows, and finds out what randomness they use."""
        columns = self._task.columns
        x, y = tf.TensorSpec((None, *columns.shape), columns.dtype), tf.TensorSpec((None,), tf.int64)
        self._shard = tf.function(self._shard_step).get_concrete_function(x, y, tf.TensorSpec((2,), tf.int32))
        self._evaluate = tf.function(self._score_rows).get_concrete_function(x, y)
        mean, counters = tf.TensorSpec((self.layout.size,), self._dtype), tf.TensorSpec((self.layout.num_counters,), tf.int64)
        self._apply = tf.function(self._apply_step).get_concrete_function(mean, counters, tf.TensorSpec((), tf.float32))
        known = [*self._weights.values(), *self._buffers.values(), *self._counters.values(), *self.model.metrics_variables]
        self._generators = _generators(self._shard, self.model, known)
        self._evaluation_generators = _generators(self._evaluate, self.model, known)

    def _shard_step(self, x: tf.Tensor, y: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """One shard: its flat summed gradient and buffers, its counters, its scores.

        The model's buffers are as before when it ends: the next shard starts from them too, and a step that comes to nothing
        leaves no trace.
        """
        buffers = [*self._buffers.values(), *self._counters.values()]
        before = [tf.identity(v.value) for v in buffers]
        variables = [v.value for v in self._trained]
        with tf.GradientTape() as tape:
            outputs = self._predict(x, True, seed)
            loss = self._sum_losses(y, outputs)
        gradients = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        flat = [tf.reshape(tf.convert_to_tensor(gradient), [-1]) for gradient in gradients]
        flat += [tf.reshape(v.value, [-1]) for v in self._buffers.values()]
        result = _on_host(tf.concat(flat, 0)), _flatten(self._counters.values(), tf.int64), self._scores(y, outputs, loss)
        for variable, value in zip(buffers, before, strict=True):
            variable.assign(value)
        return result

    def _score_rows(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        outputs = self._predict(x, False)
        return self._scores(y, outputs, self._sum_losses(y, outputs))

    def _apply_step(self, mean: tf.Tensor, counters: tf.Tensor, lr: tf.Tensor) -> None:
        gradient, buffers = tf.split(mean, [self.layout.num_parameters, self.layout.num_buffers])
        if self._clip_norm is not None:
            gradient *= tf.minimum(self._clip_norm / (tf.norm(gradient) + 1e-6), 1.0)
        pieces = tf.split(gradient, [size_of(v) for v in self._trained])
        gradients = [tf.reshape(piece, v.shape) for piece, v in zip(pieces, self._trained, strict=True)]
        if self._decay:
            gradients = [g + self._decay * v.value for g, v in zip(gradients, self._trained, strict=True)]
        self.optimizer.learning_rate = lr
        self.optimizer.apply(gradients, self._trained)
        self._assign(self._buffers.values(), buffers)
        self._assign(self._counters.values(), counters)

    def _predict(self, x: tf.Tensor, training: bool, seed: tf.Tensor | None = None) -> tf.Tensor:
        inputs = self._task.keras_inputs(x)
        outputs = self.model(inputs if seed is None else self._task.keras_augment(inputs, seed), training=training)
        if not tf.is_tensor(outputs):
            raise JobError(f"model: it returns a {type(outputs).__name__}; expected one tensor, with a row for each y")
        return tf.cast(outputs, tf.float32) if outputs.dtype in (tf.bfloat16, tf.float16) else outputs

    def _sum_losses(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Sum of the rows' losses; what layers add to the loss (regularizers) counts once for each row."""
        loss = tf.reduce_sum(self._row_losses(y, outputs))
        for extra in self.model.losses:
            loss += tf.cast(extra, loss.dtype) * tf.cast(tf.shape(y)[0], loss.dtype)
        return loss

    def _scores(self, y: tf.Tensor, outputs: tf.Tensor, loss: tf.Tensor) -> tf.Tensor:
        scores = tf.stack([tf.cast(loss, tf.float64), tf.cast(self._task.keras_correct(outputs, y), tf.float64)])
        return _on_host(tf.concat([scores, *parts.metric_sums(self._metrics, y, outputs)], 0))

    @staticmethod
    def _assign(variables: Collection[Any], flat: tf.Tensor) -> None:
        pieces = tf.split(flat, [size_of(v) for v in variables]) if variables else []
        for variable, piece in zip(variables, pieces, strict=True):
            variable.assign(tf.cast(tf.reshape(piece, variable.shape), variable.dtype))

    # ---- state ----

    def metrics(self, extra: Sequence[float]) -> dict[str, float]:
        return parts.metric_results(self._metrics, extra)

    def state(self) -> TrainState:
        optimizer = {**_read(self._slots), **self.callbacks.state()}
        return TrainState(self.weights(), _read({**self._buffers, **self._counters}), optimizer)

    def load(self, state: TrainState) -> None:
        buffers = {**self._buffers, **self._counters}
        slots = {name: array for name, array in state.optimizer.items() if not name.startswith(PREFIX)}
        groups = {"weights": (self._weights, state.weights), "buffers": (buffers, state.buffers)}
        if slots:  # weights alone will do where nothing is trained
            groups["optimizer state"] = (self._slots, slots)
        for what, (variables, found) in groups.items():
            check_names(what, {name: tuple(v.shape) for name, v in variables.items()}, found)
        for variables, found in groups.values():
            for name, variable in variables.items():
                variable.assign(found[name])
        self.callbacks.load({name: array for name, array in state.optimizer.items() if name.startswith(PREFIX)})

    def weights(self) -> Arrays:
        return _read(self._weights)

    def export(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / self.own_file
            self.model.save(path)
            return path.read_bytes()

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        weights = _flatten([*self._trained, *self._buffers.values()], self._dtype)
        return from_dlpack(weights), from_dlpack(_flatten(self._counters.values(), tf.int64))

    def load_flat(self, vector: torch.Tensor, counters: torch.Tensor) -> None:
        self._assign([*self._trained, *self._buffers.values()], tf.constant(vector.numpy()))
        self._assign(self._counters.values(), tf.constant(counters.numpy()))


def build_model(keras: Any, task: Task, job: Job) -> Any:
    """The task's model with all its variables, from the job's seed alone.

    Raises:
        JobError: it is no model of `keras`.
    """
    policy = keras.config.dtype_policy()
    keras.utils.clear_session(free_memory=False)  # names of layers count from the start in every process
    keras.utils.set_random_seed(shard_seed([job.train.seed]) & 0xFFFFFFFF)
    keras.config.set_dtype_policy("mixed_bfloat16" if job.train.precision == "bf16" else policy)
    try:
        model = task.keras_model(keras, job.model.name, task.models[job.model.name](**job.model.options))
        if not isinstance(model, keras.Model):
            found = f"{type(model).__module__}.{type(model).__name__}"
            raise JobError(
                f"keras_model: returned a {found}; expected a model built with the argument keras, here {keras.__name__}"
            )
        if not model.built:
            rows = task.keras_inputs(tf.zeros((1, *task.columns.shape), task.columns.dtype))
            # Symbolic, so that statistics stay as they are.
            model(keras.KerasTensor((None, *rows.shape[1:]), rows.dtype.name), training=True)
    finally:
        keras.config.set_dtype_policy(policy)
    return model


def variable_names(model: Any) -> dict[str, Any]:
    """The model's weights by names that are the same in every process: layer and variable, without the model's own name."""
    names: dict[str, Any] = {}
    for variable in model.weights:
        name = variable.path.removeprefix(f"{model.name}/").replace("/", ".")
        if name in names:
            raise JobError(f"model: two weights are called {name!r}; give its layers different names")
        names[name] = variable
    return names


def _slot_names(optimizer: Any, parameters: Mapping[str, str]) -> dict[str, Any]:
    """The optimizer's variables as `<slot>.<parameter>`; `parameters` has the weights' names by their paths.

    Keras calls a slot by the path of its weight and the slot's own name, joined with underscores.
    """
    prefixes = {f"{path.replace('/', '_')}_": name for path, name in parameters.items()}
    names = {}
    for variable in optimizer.variables:
        path = variable.path.removeprefix(f"{optimizer.name}/")
        owner = max((prefix for prefix in prefixes if path.startswith(prefix)), key=len, default=None)
        names[path.replace("/", ".") if owner is None else f"{path.removeprefix(owner)}.{prefixes[owner]}"] = variable
    return names


def _generators(function: Any, model: Any, known: Iterable[Any]) -> list[Any]:
    """States of the random generators that a traced function uses: the model's in its order, then others by name.

    Raises:
        JobError: the function has randomness or variables that would make its result depend on the worker.
    """
    graph = function.graph.as_graph_def()
    nodes = chain(graph.node, *(inner.node_def for inner in graph.library.function))
    hidden = sorted({node.op for node in nodes} & parts.STATEFUL_RANDOM)
    if hidden:
        raise JobError(
            f"the task uses TensorFlow's {hidden[0]}, whose generator cannot be set from the shard; use keras.random, "
            "Keras layers, or tf.random.stateless_... with the seed that keras_augment gets"
        )
    seen = {id(v.value) for v in known}
    unknown = {id(v): v for v in function.variables if id(v) not in seen}
    owned = [unknown.pop(id(v.value)) for v in model.variables if id(v.value) in unknown]
    states = [*owned, *sorted(unknown.values(), key=lambda v: str(v.name))]
    for state in states:
        if tuple(state.shape) != (2,) or not state.dtype.is_integer:
            raise JobError(
                f"the task uses the variable {state.name}, which is no weight of the model, so its value would differ between "
                "workers; make it a weight of a layer, or a constant"
            )
    return states


def _seed_states(states: Iterable[Any], seed: int) -> None:
    for number, state in enumerate(states):
        state.assign(tf.cast(seed_pair(seed, number), state.dtype))


def seed_pair(seed: int, number: int) -> np.ndarray:
    """Two int32 that depend on a shard's seed and the number of the generator in the model."""
    mixed = shard_seed([seed, number])
    return np.array([mixed & 0x7FFFFFFF, mixed >> 31 & 0x7FFFFFFF], np.int32)


def _flat_dtype(trained: Collection[Any], buffers: Mapping[str, Any]) -> torch.dtype:
    dtypes = {v.dtype for v in trained}
    if not dtypes:
        raise JobError("model: it has no weights to train")
    if len(dtypes) > 1 or not dtypes <= {"float32", "float64"}:
        raise JobError(
            f"model: its weights have dtype {', '.join(sorted(dtypes))}; expected float32 or float64 for all. "
            "Keep the model in float32 and use train.precision: bf16 to compute in bfloat16"
        )
    dtype = dtypes.pop()
    for name, buffer in buffers.items():
        if buffer.dtype != dtype:
            raise JobError(f"model: {name} has dtype {buffer.dtype}; expected {dtype}, as the weights have")
    return torch.float64 if dtype == "float64" else torch.float32


def size_of(variable: Any) -> int:
    return int(np.prod(variable.shape))


def _flatten(variables: Iterable[Any], dtype: tf.DType) -> tf.Tensor:
    """One vector of them, on the host."""
    return _on_host(tf.concat([tf.zeros(0, dtype), *(tf.reshape(tf.cast(v.value, dtype), [-1]) for v in variables)], 0))


def _on_host(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device("/device:CPU:0"):
        return tf.identity(tensor)


def _sample_labels(columns: Columns) -> tf.Tensor:
    """Labels to try a loss with, from the highest class down."""
    return columns.num_classes - 1 - tf.range(SAMPLE_ROWS, dtype=tf.int64) % columns.num_classes


def _sample_rows(columns: Columns) -> tf.Tensor:
    """Rows to try a model with."""
    rng, shape = np.random.Generator(np.random.PCG64(0)), (SAMPLE_ROWS, *columns.shape)
    whole = np.dtype(columns.dtype).kind in "iu"
    return tf.constant((rng.integers(0, 100, shape) if whole else rng.normal(size=shape)).astype(columns.dtype))


def _read(variables: Mapping[str, Any]) -> Arrays:
    """Copies on the host."""
    return {name: np.array(v.numpy()) for name, v in variables.items()}
