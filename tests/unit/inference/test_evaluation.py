"""Evaluation: every row once, in the order of training's own sums."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from raytrain_app.elastic.plan import shard_rows
from raytrain_app.elastic.reduce import Layout, Reducer, Shard
from raytrain_app.inference.evaluation import Mistake, Scored, _tree_sum, add_up, batches, picture_of, score_all, worst
from raytrain_app.inference.trained import BATCH_ROWS, Trained
from raytrain_app.job import job_from_dict
from raytrain_app.learners.torch import TorchLearner
from raytrain_app.tasks.mnist import TASK


@given(st.integers(0, 5000), st.integers(1, 40))
def test_batches_cover_each_row_once_in_order(num_rows: int, num_shards: int) -> None:
    found = batches(num_rows, num_shards)
    rows = [row for batch in found for row in range(batch.start, batch.stop)]
    assert rows == list(range(num_rows))
    assert all(0 < batch.stop - batch.start <= BATCH_ROWS for batch in found)
    for batch in found:
        place = shard_rows(num_rows, num_shards, batch.shard)
        assert place.start <= batch.start < batch.stop <= place.stop


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=33))
def test_sums_have_the_bits_of_training(values: list[float]) -> None:
    shards = np.array([[value, 1.0] for value in values])
    reducer = Reducer(0, 1, len(values), Layout(), 0, torch.device("cpu"))
    nothing = torch.empty(0)
    total = reducer.reduce(lambda n, _: Shard(nothing, nothing.long(), torch.from_numpy(shards[n].copy())), len(values), 1, [])
    assert _tree_sum(shards, (0, len(values)))[0] == total.loss


def make_trained(**train: Any) -> Trained:
    job = job_from_dict({"name": "a", "task": "mnist", "model": {"name": "linear"}, "train": {"virtual_shards": 3, **train}})
    learner = TorchLearner(job, TASK, torch.device("cpu"))
    return Trained(job, TASK, learner, learner.state(), "step-00000000", "", [])


def test_confusion_and_scores_count_the_same() -> None:
    trained = make_trained()
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (777, 28, 28), np.uint8), rng.integers(0, 10, 777)
    heard: list[int] = []
    total = add_up(777, 3, score_all(trained, (x, y), heard.append))
    assert total.confusion is not None
    assert total.confusion.sum() == 777
    assert np.trace(total.confusion) == round(total.scores[1])
    assert total.confusion.sum(axis=1).tolist() == np.bincount(y, minlength=10).tolist()
    assert heard[-1] == 777
    probabilities = trained.probabilities(x)
    assert probabilities.sum(axis=1) == pytest.approx(1)
    of_label = probabilities[np.arange(777), y]
    wrong = np.flatnonzero(probabilities.argmax(1) != y)
    expected = wrong[np.argsort(of_label[wrong], kind="stable")][:24]
    assert [mistake.row for mistake in total.mistakes] == expected.tolist()
    assert total.scores[0] == pytest.approx(-np.log(of_label).sum(), rel=1e-5)


def test_outputs_that_are_no_classes_have_no_confusion() -> None:
    trained = make_trained()
    trained.task = SimpleNamespace(columns=TASK.columns, probabilities=lambda outputs: outputs[:, :3])  # type: ignore[assignment]
    total = add_up(5, 3, score_all(trained, (np.zeros((5, 28, 28), np.uint8), np.zeros(5, np.int64))))
    assert total.confusion is None
    assert total.mistakes == []


def test_the_worst_mistakes_come_first() -> None:
    mistakes = [Mistake(row, 0, 1, 0.9, share, np.zeros(1)) for row, share in enumerate([0.3, 0.1, 0.2] * 20)]
    kept = worst(mistakes)
    assert len(kept) == 24
    assert [m.probability_of_label for m in kept] == sorted([0.3, 0.1, 0.2] * 20)[:24]
    assert worst([]) == []


def test_a_matrix_is_kept_only_if_every_batch_has_one() -> None:
    total = add_up(300, 1, [Scored(np.ones(2), np.ones((2, 2), np.int64)), Scored(np.ones(2))])
    assert total.confusion is None
    assert total.scores.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("shape", [(28, 28), (28, 28, 1), (8, 9, 3)])
def test_rows_that_are_images_become_pictures(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    uri = picture_of(x)
    assert uri is not None
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))
    assert np.array_equal(image, x.reshape(image.shape))


@pytest.mark.parametrize("x", [np.zeros(16, np.float32), np.zeros((28, 28), np.float32), np.zeros((600, 600), np.uint8)])
def test_other_rows_do_not(x: np.ndarray) -> None:
    assert picture_of(x) is None
