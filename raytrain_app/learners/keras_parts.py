"""What a task brings for Keras beside its model: loss, metrics and optimizer, as objects the engine can work with.

What cannot be honoured across workers is refused here by name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from raytrain_app.errors import JobError
from raytrain_app.job import Job
from raytrain_app.job.model import Adam
from raytrain_app.task import Task

RowLosses = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
Sample = tuple[tf.Tensor, tf.Tensor]
"""Labels, of every class, and what the model puts out for that many rows."""

STATEFUL_RANDOM = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "TruncatedNormal",
    }
)
"""Operations that keep their generator to themselves: what they give depends on how often they ran in this process."""


def make_loss(keras: Any, task: Task, sample: Sample) -> tuple[Any, RowLosses]:
    """The task's loss as Keras has it, and as a function of labels (rows,) and outputs that returns one loss a row.

    Raises:
        JobError: it reduces in a way that depends on how a batch is cut, or does not fit the model or the labels.
    """
    loss = keras.losses.get(task.keras_loss(keras))
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction not in ("sum_over_batch_size", "mean", "auto"):
        raise JobError(
            f"keras_loss: {_name(loss)} has reduction={reduction!r}; expected 'sum_over_batch_size', "
            "since a step's loss is the mean over the rows of the global batch"
        )
    function = loss.call if isinstance(loss, keras.losses.Loss) else loss

    def row_losses(y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        # Keras, too, hands labels to a loss in the dtype of the outputs.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="(?s).*does not represent logits")
            try:
                values = tf.convert_to_tensor(function(tf.cast(y, outputs.dtype), outputs))
            except UserWarning:
                raise JobError(
                    f"keras_loss: {_name(loss)} has from_logits=True, but the model ends with an activation that gives "
                    "probabilities; leave that activation out, or define keras_loss with from_logits=False and probabilities"
                ) from None
        if values.shape.rank == 0:
            raise JobError(f"keras_loss: {_name(loss)} returns one number for a batch; expected one for each row")
        return tf.reduce_mean(values, axis=list(range(1, values.shape.rank)))

    with _explained("keras_loss", [loss], sample):
        row_losses(*sample)
    return loss, row_losses


def compile_model(keras: Any, task: Task, model: Any, optimizer: Any, loss: Any, sample: Sample) -> list[Any]:
    """Compiles the model, so that callbacks and saved files find what they expect, and returns the task's own metrics.

    Raises:
        JobError: a metric does not fit the model or the labels, gives more than a number, or cannot be added up over parts
            of a batch.
    """
    wanted = [metric for metric in task.keras_metrics(keras) if metric not in ("accuracy", "acc")]
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy", *wanted])
    y, outputs = sample
    with _explained("keras_metrics", wanted, sample):
        model.compute_metrics(None, y, outputs)  # builds them: names become objects
    groups = [metric.metrics for metric in model.metrics if hasattr(metric, "metrics")]
    metrics = [metric for group in groups for metric in group if metric.name != "accuracy"]
    for metric in metrics:
        _refuse_if_not_additive(metric, y, outputs)
    model.reset_metrics()
    return metrics


def metric_sums(metrics: Sequence[Any], y: tf.Tensor, outputs: tf.Tensor) -> list[tf.Tensor]:
    """The metrics' state for these rows alone, as float64 vectors."""
    for metric in metrics:
        metric.reset_state()
        metric.update_state(y, outputs)
    return [tf.reshape(tf.cast(tf.convert_to_tensor(v), tf.float64), [-1]) for metric in metrics for v in metric.variables]


def metric_results(metrics: Sequence[Any], sums: Sequence[float]) -> dict[str, float]:
    """The metrics' values for summed states, by name."""
    values, start = np.asarray(sums), 0
    for variable in (v for metric in metrics for v in metric.variables):
        size = int(np.prod(variable.shape))
        variable.assign(values[start : start + size].reshape(variable.shape))
        start += size
    return {metric.name: float(metric.result()) for metric in metrics}


def make_optimizer(keras: Any, task: Task, job: Job) -> tuple[Any, float]:
    """The task's optimizer, else the job's, and the factor of the L2 term to be added to the gradient.

    AdamW's weight decay is its own affair; that of the job's other optimizers is the L2 term.

    Raises:
        JobError: the task's optimizer has something that the engine or the job decides.
    """
    rule = job.optimizer
    own = task.keras_optimizer(keras, rule.lr)
    if own is None:
        return _job_optimizer(keras, job), 0.0 if rule.name == "adamw" else rule.weight_decay
    optimizer = keras.optimizers.get(own)
    config: Mapping[str, Any] = optimizer.get_config()
    if isinstance(own, str):
        optimizer.learning_rate = rule.lr
    _refuse_optimizer(_name(optimizer), config, rule.lr if not isinstance(own, str) else None)
    chosen = rule.model_dump(exclude={"lr", "schedule", "warmup_steps"})
    if chosen != Adam().model_dump(exclude={"lr", "schedule", "warmup_steps"}):
        raise JobError(
            f"optimizer: the task trains with its own {_name(optimizer)}, so the job can give only lr, schedule and "
            f"warmup_steps; found {', '.join(f'{key}: {value}' for key, value in chosen.items())}"
        )
    return optimizer, 0.0


def _job_optimizer(keras: Any, job: Job) -> Any:
    rule = job.optimizer
    if rule.name == "sgd":
        return keras.optimizers.SGD(rule.lr, momentum=rule.momentum)
    moments = {"beta_1": rule.betas[0], "beta_2": rule.betas[1], "epsilon": rule.eps}
    if rule.name == "adam":
        return keras.optimizers.Adam(rule.lr, **moments)
    return keras.optimizers.AdamW(rule.lr, weight_decay=rule.weight_decay, **moments)


def _refuse_optimizer(name: str, config: Mapping[str, Any], lr: float | None) -> None:
    for key, why in {
        "use_ema": "averaged weights would be used at the end of `fit`, which does not run",
        "loss_scale_factor": "gradients are exact without it",
        "inner_optimizer": "train.precision: bf16 needs no loss scaling",
    }.items():
        if config.get(key):
            raise JobError(f"keras_optimizer: {name} with {key} is not available: {why}")
    if isinstance(config["learning_rate"], dict):
        raise JobError(f"keras_optimizer: {name} has a schedule of its own; use optimizer.schedule of the job, or a callback")
    if lr is not None and np.float32(config["learning_rate"]) != np.float32(lr):
        raise JobError(
            f"keras_optimizer: {name} has learning rate {config['learning_rate']:g}, but optimizer.lr of the job is {lr:g}; "
            "build it with the argument lr"
        )


def _refuse_if_not_additive(metric: Any, y: tf.Tensor, outputs: tf.Tensor) -> None:
    """The states of two parts must add up to the state of the whole, else no sum over shards gives the metric's value."""
    half = len(y) // 2
    parts = [tf.concat(metric_sums([metric], y[part], outputs[part]), 0) for part in (slice(half), slice(half, None))]
    whole = tf.concat(metric_sums([metric], y, outputs), 0)
    if not np.allclose(parts[0] + parts[1], whole, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise JobError(f"keras_metrics: {metric.name} cannot be added up over the shards of a batch, so it has no global value")
    result = metric.result()
    if isinstance(result, Mapping) or np.ndim(result) != 0:
        raise JobError(f"keras_metrics: {metric.name} is not one number; expected a metric of one number")


@contextmanager
def _explained(hook: str, things: Sequence[Any], sample: Sample) -> Iterator[None]:
    """Says in one sentence what Keras's own losses and metrics tell in many lines; what a task wrote itself has a traceback."""
    try:
        yield
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        if not all(isinstance(thing, str) or thing.__module__.startswith("keras.") for thing in things):
            raise
        y, outputs = sample
        last = re.sub(r"\{\{.*?\}\} ?| \[Op:.*", "", [line for line in str(error).splitlines() if line.strip()][-1]).strip()
        raise JobError(
            f"{hook}: {' or '.join(map(_name, things))} cannot be computed for labels up to {int(tf.reduce_max(y))} and a model "
            f"that puts out the shape {tuple(outputs.shape[1:])} for a row: {last}"
        ) from error


def _name(thing: Any) -> str:
    return thing if isinstance(thing, str) else str(getattr(thing, "__name__", type(thing).__name__))
