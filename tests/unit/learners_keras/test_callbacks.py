"""Keras callbacks that change hands: a run of epochs on one worker, or with another leader for each of them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain_app.errors import JobError, TrainingError
from tests.unit.learners_keras.given import keras, make_learner

Callback: Any = keras.callbacks.Callback
STEPS = 5
Make = Callable[[Any, str], Sequence[Any]]


def lead(make: Make, directory: Path, losses: Sequence[float], change: bool, **job: Any) -> Any:
    """Epochs with these validation losses; with `change`, each on a new worker that knows what the last one kept."""
    learner = _learner(make, directory, job)
    learner.callbacks.wake(STEPS)
    for epoch, loss in enumerate(losses):
        if change:
            kept = learner.state()
            learner = _learner(make, directory, job)
            learner.load(kept)
            learner.callbacks.wake(STEPS)
        callbacks = learner.callbacks
        callbacks.run("on_epoch_begin", epoch, {})
        for step in range(STEPS):
            callbacks.run("on_train_batch_begin", step, {})
            callbacks.run("on_train_batch_end", step, {"loss": loss})
        learner.model.trainable_weights[0].assign(np.full(learner.model.trainable_weights[0].shape, epoch, np.float32))
        callbacks.run("on_epoch_end", epoch, {"loss": loss, "val_loss": loss, "accuracy": 0.5, "val_accuracy": 1 - loss})
        if callbacks.stop:
            break
    learner.callbacks.run("on_train_end", {})
    return learner


def _learner(make: Make, directory: Path, job: dict[str, Any]) -> Any:
    return make_learner(sections=job, directory=str(directory), keras_callbacks=make)


@pytest.mark.parametrize("change", [False, True], ids=["one leader", "a leader an epoch"])
def test_early_stopping_counts_on_and_restores_the_best(change: bool, tmp_path: Path) -> None:
    def make(keras: Any, directory: str) -> list[Any]:
        return [keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)]

    learner = lead(make, tmp_path, [0.5, 0.4, 0.45, 0.41, 0.3], change)
    assert learner.callbacks.stop
    assert learner.callbacks.ended == 4
    assert set(learner.weights()["dense.kernel"].ravel()) == {1.0}  # those after the second epoch


@pytest.mark.parametrize("change", [False, True], ids=["one leader", "a leader an epoch"])
def test_learning_rates_are_told_and_go_on(change: bool, tmp_path: Path) -> None:
    def make(keras: Any, directory: str) -> list[Any]:
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5 if epoch else lr),
            keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=2),
        ]

    learner = lead(make, tmp_path, [0.5, 0.5, 0.5, 0.5], change, optimizer={"lr": 0.08})
    # Halved three times, and a tenth once, after the third epoch.
    assert learner.callbacks.lr == pytest.approx(0.08 * 0.5**3 * 0.1, rel=1e-6)
    assert float(learner.optimizer.learning_rate) == np.float32(learner.callbacks.lr)


@pytest.mark.parametrize("change", [False, True], ids=["one leader", "a leader an epoch"])
def test_files_go_on(change: bool, tmp_path: Path) -> None:
    def make(keras: Any, directory: str) -> list[Any]:
        return [
            keras.callbacks.CSVLogger(f"{directory}/log.csv"),
            keras.callbacks.ModelCheckpoint(f"{directory}/best.keras", "val_accuracy", save_best_only=True),
            keras.callbacks.TensorBoard(f"{directory}/logs", update_freq=2),
        ]

    lead(make, tmp_path, [0.5, 0.2, 0.4], change)
    with (tmp_path / "keras/log.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["epoch"], line["val_loss"]) for line in lines] == [("0", "0.5"), ("1", "0.2"), ("2", "0.4")]
    best = keras.models.load_model(tmp_path / "keras/best.keras")
    assert set(np.asarray(best.trainable_weights[0]).ravel()) == {1.0}
    assert list((tmp_path / "keras/logs").rglob("events.out.*"))


class Counting(Callback):  # type: ignore[misc]
    """A callback of one's own that keeps all that can travel, and one thing that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.vector, self.path = 0, np.zeros(2), "never carried"
        self.seen: dict[str, list[Any]] = {"losses": []}
        self.file: object = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.file = object()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        self.vector = self.vector + 1.0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen["losses"].append(np.float32(logs["loss"]))


@pytest.mark.parametrize("change", [False, True], ids=["one leader", "a leader an epoch"])
def test_attributes_of_own_callbacks_travel(change: bool, tmp_path: Path) -> None:
    learner = lead(lambda keras, directory: [Counting()], tmp_path, [0.5, 0.25], change)
    (mine,) = learner.callbacks._callbacks
    assert mine.batches == 2 * STEPS
    assert mine.vector.tolist() == [2.0 * STEPS, 2.0 * STEPS]
    assert mine.seen == {"losses": [0.5, 0.25]}
    assert mine.file is not None
    assert {"on_train_batch_end", "on_epoch_end"} <= learner.callbacks.hooks


def test_what_was_as_made_is_not_carried(tmp_path: Path) -> None:
    """A path may be another one on the next leader's machine."""
    learner = lead(lambda keras, directory: [Counting()], tmp_path, [0.5], change=False)
    assert b"never carried" not in learner.callbacks.state()["callbacks.json"].tobytes()


def test_without_callbacks_nothing_is_kept(tmp_path: Path) -> None:
    learner = make_learner(directory=str(tmp_path))
    assert not learner.callbacks.hooks
    assert not [name for name in learner.state().optimizer if name.startswith("callbacks")]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda keras, directory: [keras.callbacks.BackupAndRestore(directory)], "BackupAndRestore is not available"),
        (lambda keras, directory: ["EarlyStopping"], "found a str; expected callbacks of keras"),
        (
            lambda keras, directory: [keras.callbacks.ModelCheckpoint("best.keras")],
            r"ModelCheckpoint writes to 'best\.keras'.*\{directory\}/best\.keras",
        ),
        (lambda keras, directory: [keras.callbacks.TensorBoard()], "TensorBoard writes to 'logs'"),
        (lambda keras, directory: [_OnTestBatch()], "_OnTestBatch has on_test_batch_begin or on_test_batch_end"),
    ],
)
def test_callbacks_that_cannot_be_honoured_are_refused(make: Make, message: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=message):
        make_learner(directory=str(tmp_path), keras_callbacks=make)


class _OnTestBatch(Callback):  # type: ignore[misc]
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


def test_a_learning_rate_beside_the_jobs_schedule_is_refused(tmp_path: Path) -> None:
    def make(keras: Any, directory: str) -> list[Any]:
        return [keras.callbacks.LearningRateScheduler(lambda epoch: 0.5)]

    with pytest.raises(TrainingError, match=r"LearningRateScheduler set the learning rate, but the job has optimizer\.schedule"):
        lead(make, tmp_path, [0.5], change=False, optimizer={"schedule": "cosine"})
