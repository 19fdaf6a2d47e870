"""Losses, metrics and optimizers that a task brings: honoured as Keras has them, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raytrain_app.errors import JobError
from tests.unit.learners_keras.given import CLASSES, FEATURES, keras, make_learner, reduce, rows, tf, train

Loss: Any = keras.losses.Loss
Metric: Any = keras.metrics.Metric


def one_output(keras: Any) -> Any:
    return keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(1)])


class Hinge(Loss):  # type: ignore[misc]
    """A loss of one's own."""

    def call(self, y: Any, outputs: Any) -> Any:
        return tf.nn.relu(1.0 - y * outputs[:, 0])


@pytest.mark.parametrize(
    ("loss", "plain"),
    [
        ("mse", keras.losses.MeanSquaredError()),
        (keras.losses.Huber(0.5), keras.losses.Huber(0.5)),
        (Hinge(), Hinge()),
        (lambda y, outputs: tf.abs(y - outputs[:, 0]), lambda y, outputs: tf.reduce_mean(tf.abs(y - outputs[:, 0]))),
    ],
    ids=["name", "object", "own class", "function"],
)
def test_losses_by_name_object_and_function(loss: Any, plain: Any) -> None:
    learner = make_learner(one_output, keras_loss=lambda keras: loss)
    x, y = rows(20)
    expected = float(plain(tf.constant(y, tf.float32), learner.model(x)))
    assert reduce(learner, x, y).loss / 20 == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda keras: keras.losses.MeanSquaredError(reduction="sum"), "MeanSquaredError has reduction='sum'; expected"),
        (lambda keras: lambda y, outputs: tf.reduce_mean(outputs), "returns one number for a batch; expected one for each row"),
    ],
)
def test_losses_that_depend_on_how_a_batch_is_cut_are_refused(loss: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        make_learner(keras_loss=loss)


def test_probabilities_where_the_loss_expects_scores_are_refused() -> None:
    """Training would go on, slowly, with the softmax of a softmax."""
    with pytest.raises(JobError, match=r"SparseCategoricalCrossentropy has from_logits=True, but the model ends"):
        make_learner(_softmax)


@pytest.mark.parametrize(
    ("make", "hooks", "message"),
    [
        (one_output, {}, r"SparseCategoricalCrossentropy cannot be computed for labels up to 2.*the shape \(1,\)"),
        (None, {"keras_loss": lambda keras: "categorical_crossentropy"}, "categorical_crossentropy cannot be computed"),
        (None, {"keras_metrics": lambda keras: ["AUC"]}, "AUC cannot be computed for labels up to 2"),
    ],
)
def test_what_does_not_fit_the_model_and_the_labels_is_refused(make: Any, hooks: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        make_learner(make, **hooks)


def test_metrics_of_shards_add_up_to_those_of_all_rows() -> None:
    def make(keras: Any) -> list[Any]:
        top2 = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")
        surest = keras.metrics.MeanMetricWrapper(lambda y, outputs: tf.reduce_max(outputs, axis=1), name="surest")
        return ["accuracy", top2, surest, "sparse_categorical_crossentropy"]

    loss = "sparse_categorical_crossentropy"
    learner = make_learner(_softmax, keras_metrics=make, keras_loss=lambda keras: loss)
    x, y = rows(33)
    parts = [learner.evaluate(x[low : low + 10], y[low : low + 10]) for low in range(0, 33, 10)]
    found = learner.metrics(sum(parts)[2:].tolist())
    assert list(found) == ["top2", "surest", loss]
    outputs = learner.outputs(x)
    for metric in make(keras)[1:3]:
        metric.update_state(y, outputs)
        assert found[metric.name] == pytest.approx(float(metric.result()), rel=1e-6)
    assert found[loss] == pytest.approx(sum(parts)[0].item() / 33, rel=1e-5)
    assert learner.metrics(reduce(learner, x, y).extra) == pytest.approx(found)


def _softmax(keras: Any) -> Any:
    return keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(CLASSES, activation="softmax")])


class Largest(Metric):  # type: ignore[misc]
    """A metric whose parts do not add up."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.value.assign(tf.maximum(self.value.value, 1.0 + tf.reduce_max(tf.abs(outputs))))

    def result(self) -> Any:
        return self.value


def test_metrics_that_have_no_global_value_are_refused() -> None:
    with pytest.raises(JobError, match="largest cannot be added up over the shards"):
        make_learner(keras_metrics=lambda keras: [Largest()])


@pytest.mark.parametrize("own", ["rmsprop", keras.optimizers.RMSprop], ids=["name", "object"])
def test_optimizers_by_name_and_object(own: Any) -> None:
    """They take the job's learning rate, which is given in each step."""
    learner = make_learner(
        sections={"optimizer": {"lr": 0.02}}, keras_optimizer=lambda keras, lr: own if isinstance(own, str) else own(lr)
    )
    other = make_learner(sections={"optimizer": {"lr": 0.02}}, keras_optimizer=lambda keras, lr: "rmsprop")
    train(learner, range(3), lr=0.02)
    train(other, range(3), lr=0.02)
    assert type(learner.optimizer).__name__ == "RMSprop"
    assert learner.state().to_bytes() == other.state().to_bytes()
    assert "velocity.dense.kernel" in learner.state().optimizer


@pytest.mark.parametrize(
    ("make", "job", "message"),
    [
        (lambda keras, lr: keras.optimizers.Adam(0.5), {}, "Adam has learning rate 0.5, but optimizer.lr of the job is 0.001"),
        (
            lambda keras, lr: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(lr, 10)),
            {},
            "SGD has a schedule of its own; use optimizer.schedule",
        ),
        (lambda keras, lr: keras.optimizers.SGD(lr, use_ema=True), {}, "SGD with use_ema is not available"),
        (lambda keras, lr: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(lr)), {}, "inner_optimizer is not available"),
        (
            lambda keras, lr: keras.optimizers.SGD(lr),
            {"optimizer": {"name": "adamw"}},
            "its own SGD, so the job can give only lr, schedule and",
        ),
    ],
    ids=["lr", "schedule", "ema", "loss scale", "job's options"],
)
def test_optimizers_that_the_engine_overrules_are_refused(make: Any, job: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        make_learner(sections=job, keras_optimizer=make)


def test_values_are_plain_numbers() -> None:
    learner = make_learner(keras_metrics=lambda keras: [keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")])
    x, y = rows(9)
    value = learner.metrics(learner.evaluate(x, y)[2:].tolist())["top2"]
    assert type(value) is float
    assert 0.0 <= value <= 1.0
    assert np.isfinite(value)
