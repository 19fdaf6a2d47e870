"""The Keras learner against plain Keras: the same gradients and updates, and the same bits wherever a shard lies."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain_app.errors import JobError, StorageError
from raytrain_app.state import TrainState, weights_sha256
from tests.unit.learners_keras.given import (
    CLASSES,
    FEATURES,
    Given,
    dense,
    keras,
    make_job,
    make_learner,
    normed,
    reduce,
    rows,
    tf,
    train,
)

OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({"name": "sgd"}, lambda: keras.optimizers.SGD(0.1)),
    "momentum": ({"name": "sgd", "momentum": 0.9}, lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
    "adam": ({"name": "adam", "betas": [0.8, 0.99], "eps": 1e-7}, lambda: keras.optimizers.Adam(0.1, 0.8, 0.99)),
    "adamw": ({"name": "adamw", "eps": 1e-7}, lambda: keras.optimizers.AdamW(0.1, weight_decay=0.01)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_fit_does(optimizer: str) -> None:
    """The same rows in the same batches: a step of four shards is a step of `fit` but for rounding."""
    options, make_plain = OPTIMIZERS[optimizer]
    learner = make_learner(sections={"optimizer": {**options, "lr": 0.1}})
    plain = dense(keras)
    plain.set_weights(learner.model.get_weights())
    plain.compile(make_plain(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for step in range(5):
        plain.fit(*rows(10, seed=step), batch_size=10, shuffle=False, verbose=0)
    train(learner, range(5))
    for ours, theirs in zip(learner.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_scores_are_those_of_evaluate() -> None:
    learner = make_learner(normed)
    x, y = rows(50)
    loss, accuracy = learner.model.evaluate(x, y, batch_size=50, verbose=0)
    scores = learner.evaluate(x, y).numpy()
    np.testing.assert_allclose(scores / 50, [loss, accuracy], rtol=1e-6)
    np.testing.assert_allclose(learner.outputs(x), learner.model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def test_a_shard_has_the_same_bits_wherever_it_is_computed() -> None:
    """Alone, after others, after validation, in another place in memory, and in a learner that has just been built."""
    x, y = rows(23)
    learner = make_learner(normed)
    train(learner, range(2))
    alone = learner.shard(x[5:12], y[5:12], 42).vector.clone()
    others = make_learner(normed)
    others.load(learner.state())
    others.shard(x[:5], y[:5], 41)
    others.evaluate(x, y)
    shifted = np.concatenate([np.zeros((1, FEATURES), np.float32), x])[6:13]
    assert others.shard(shifted, y[5:12], 42).vector.equal(alone)
    assert not others.shard(x[5:12], y[5:12], 43).vector.equal(alone)  # another dropout


def test_all_shards_of_a_step_start_from_its_buffers() -> None:
    learner = make_learner(normed)
    train(learner, range(3))
    x, y = rows(12)
    sums = [
        learner.shard(x[part], y[part], 1).vector[learner.layout.num_parameters :].numpy() for part in (slice(6), slice(6, 12))
    ]
    again = learner.shard(x[6:], y[6:], 1).vector[learner.layout.num_parameters :].numpy()
    np.testing.assert_array_equal(sums[1], again)
    total = reduce(learner, x, y)
    learner.apply(total.mean, total.counters, 0.1)
    mean, variance = (learner.state().buffers[f"batch_normalization.moving_{name}"] for name in ("mean", "variance"))
    np.testing.assert_array_equal(total.mean[learner.layout.num_parameters :].numpy(), np.concatenate([mean, variance]))


def test_a_step_that_comes_to_nothing_leaves_no_trace() -> None:
    """Its peers died: what a newcomer then gets is the state before it."""
    learner = make_learner(normed)
    train(learner, range(2))
    before = learner.state().to_bytes()
    learner.shard(*rows(6), 1)
    assert learner.state().to_bytes() == before


def test_an_empty_shard_is_zero() -> None:
    shard = make_learner(normed).shard(*rows(0), 1)
    assert not shard.vector.any()
    assert not shard.scores.any()


def test_state_continues_where_it_was_taken() -> None:
    sections = {"optimizer": {"name": "adam", "lr": 0.1}}
    learner, other = make_learner(normed, sections), make_learner(normed, sections)
    train(learner, range(4))
    other.load(TrainState.from_bytes(learner.state().to_bytes()))
    train(learner, range(4, 8))
    train(other, range(4, 8))
    assert learner.state().to_bytes() == other.state().to_bytes()
    assert {"iteration", "momentum.dense.kernel", "velocity.dense_1.bias"} <= set(learner.state().optimizer)


def test_flat_gives_and_takes_weights_and_buffers() -> None:
    learner, other = make_learner(normed), make_learner(normed)
    train(learner, range(2))
    other.load_flat(*learner.flat())
    assert weights_sha256(other.weights()) == weights_sha256(learner.weights())
    assert other.flat()[0].equal(learner.flat()[0])


def test_names_are_the_same_in_every_process() -> None:
    """They do not depend on what was built before."""
    first = set(make_learner().weights())
    dense(keras)
    assert set(make_learner().weights()) == first == {"dense.kernel", "dense.bias", "dense_1.kernel", "dense_1.bias"}


def test_a_state_of_another_model_or_optimizer_is_refused() -> None:
    with pytest.raises(StorageError, match="the saved weights do not fit the model"):
        make_learner().load(make_learner(normed).state())
    adam, sgd = make_learner(), make_learner(sections={"optimizer": {"name": "sgd"}})
    with pytest.raises(StorageError, match="the saved optimizer state do"):
        sgd.load(adam.state())
    sgd.load(TrainState(adam.weights()))  # weights alone will do


def test_frozen_layers_are_saved_but_not_trained() -> None:
    def make(keras: Any) -> Any:
        model = dense(keras)
        model.layers[0].trainable = False
        return model

    learner = make_learner(make)
    before = learner.weights()
    train(learner, range(2))
    after = learner.weights()
    assert learner.layout.num_parameters == 5 * CLASSES + CLASSES
    assert not learner.layout.num_buffers
    assert set(after) == set(before)
    np.testing.assert_array_equal(after["dense.kernel"], before["dense.kernel"])
    assert not np.array_equal(after["dense_1.kernel"], before["dense_1.kernel"])


def test_a_subclass_an_unused_weight_and_a_regularizer() -> None:
    """A model of one's own is built from the rows' shape; a layer without part in the loss keeps its weights."""

    def make(keras: Any) -> Any:
        class Own(keras.Model):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.used = keras.layers.Dense(CLASSES, kernel_regularizer=keras.regularizers.L2(0.1))
                self.unused = keras.layers.Dense(2)

            def call(self, x: Any) -> Any:
                self.unused(x)
                return self.used(x)

        return Own()

    learner = make_learner(make, {"optimizer": {"name": "sgd"}})
    x, y = rows(8)
    kernel = learner.weights()["dense.kernel"]
    plain = float(keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, learner.model(x)))
    expected = plain + 0.1 * float(np.sum(kernel**2))
    assert learner.evaluate(x, y)[0].item() / 8 == pytest.approx(expected, rel=1e-6)
    assert reduce(learner, x, y).loss / 8 == pytest.approx(expected, rel=1e-6)
    before = learner.weights()
    train(learner, range(2))
    np.testing.assert_array_equal(learner.weights()["dense_1.kernel"], before["dense_1.kernel"])


def test_clipping_and_l2_are_of_the_mean_gradient() -> None:
    x, y = rows(10)
    plain = make_learner(sections={"optimizer": {"name": "sgd"}})
    total = reduce(plain, x, y)
    norm = float(np.linalg.norm(total.mean.numpy()))
    clipped = make_learner(sections={"optimizer": {"name": "sgd"}, "train": {"clip_norm": norm / 4}})
    decayed = make_learner(sections={"optimizer": {"name": "sgd", "weight_decay": 0.5}})
    start = plain.flat()[0].numpy()
    for learner in (plain, clipped, decayed):
        learner.apply(total.mean, total.counters, 0.1)
    step = start - plain.flat()[0].numpy()
    np.testing.assert_allclose(start - clipped.flat()[0].numpy(), step / 4, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(start - decayed.flat()[0].numpy(), step + 0.1 * 0.5 * start, rtol=1e-3, atol=1e-7)


def test_bf16_computes_in_bfloat16_and_keeps_float32() -> None:
    learner = make_learner(normed, {"train": {"precision": "bf16"}})
    train(learner, range(2))
    assert {array.dtype.name for array in learner.weights().values()} == {"float32"}
    exact = make_learner(normed)
    x, y = rows(20)
    exact.load(TrainState(learner.weights(), learner.state().buffers))
    assert learner.evaluate(x, y)[0].item() != exact.evaluate(x, y)[0].item()
    assert learner.evaluate(x, y)[0].item() == pytest.approx(exact.evaluate(x, y)[0].item(), rel=0.05)


class Noisy(Given):
    """Adds noise from all generators that follow the shard: a stateless one, Keras's global one, a layer's."""

    def keras_augment(self, x: Any, seed: Any) -> Any:
        return x + tf.random.stateless_normal(tf.shape(x), seed) + keras.random.normal(tf.shape(x))


def test_all_allowed_randomness_follows_the_shard() -> None:
    from raytrain_app.learners.keras import KerasLearner

    first, other = (KerasLearner(make_job(), Noisy(normed)) for _ in range(2))
    x, y = rows(6)
    for seed in (3, 4, 5):
        other.shard(x, y, seed)
    assert first.shard(x, y, 7).vector.equal(other.shard(x, y, 7).vector)
    assert not first.shard(x, y, 8).vector.equal(first.shard(x, y, 7).vector)


def test_what_would_depend_on_the_worker_is_refused_by_name() -> None:
    with pytest.raises(JobError, match=r"RandomUniform.*keras\.random"):
        make_learner(keras_augment=lambda x, seed: x + tf.random.uniform(tf.shape(x)))
    counter = tf.Variable(0.0, name="counter")
    with pytest.raises(JobError, match=r"variable counter.*no weight of the model"):
        make_learner(keras_augment=lambda x, seed: x + counter.assign_add(1.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda keras: keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Flatten()]), "no weights to train"),
        (lambda keras: {"not": "a model"}, "returned a builtins.dict"),
        (lambda keras: _two_outputs(keras), "returns a list; expected one tensor"),
        (lambda keras: _with_dtype(keras, "float16"), "its weights have dtype float16"),
    ],
    ids=itertools.count(),
)
def test_a_model_that_cannot_train_is_refused(make: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        make_learner(make)


def _two_outputs(keras: Any) -> Any:
    inputs = keras.Input((FEATURES,))
    return keras.Model(inputs, [keras.layers.Dense(CLASSES)(inputs), keras.layers.Dense(2)(inputs)])


def _with_dtype(keras: Any, dtype: str) -> Any:
    return keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(CLASSES, dtype=dtype)])


def test_float64_models_are_summed_in_float64() -> None:
    learner = make_learner(lambda keras: _with_dtype(keras, "float64"))
    assert str(learner.layout.dtype) == "torch.float64"
    train(learner, range(2))
    assert {array.dtype.name for array in learner.weights().values()} == {"float64"}


def test_the_saved_file_is_the_model(tmp_path: Path) -> None:
    learner = make_learner(normed)
    train(learner, range(2))
    path = tmp_path / "model.keras"
    path.write_bytes(learner.export())
    loaded = keras.models.load_model(path)
    x, _ = rows(5)
    np.testing.assert_array_equal(loaded(x), learner.model(x))
