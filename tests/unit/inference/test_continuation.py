"""Texts that a language model goes on with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raytrain_app.inference.continuation import continue_texts, reads_texts
from raytrain_app.inference.trained import Trained
from raytrain_app.job import job_from_dict
from raytrain_app.learners.torch import TorchLearner
from raytrain_app.learners.torch_parts import prepare_process
from raytrain_app.tasks.mnist import TASK as MNIST
from raytrain_app.tasks.small_language import LENGTH, encode
from raytrain_app.tasks.tiny_gpt import TASK


@pytest.fixture(scope="module")
def trained() -> Trained:
    job = job_from_dict({"name": "a", "task": "tiny_gpt", "model": {"name": "gpt", "layers": 1, "width": 16, "heads": 2}})
    prepare_process(job)
    learner = TorchLearner(job, TASK, torch.device("cpu"))
    return Trained(job, TASK, learner, learner.state(), "step-00000000", "", [])


def test_each_next_character_is_the_most_probable_one(trained: Trained) -> None:
    found = next(continue_texts(trained, ["S12="]))
    assert found.error is None
    assert found.probability is not None
    row = encode(found.text + found.continuation)
    assert len(row) == 1 + LENGTH
    shares = trained.probabilities(row[None])[0]
    assert np.array_equal(shares[3:].argmax(axis=1), row[4:])
    assert found.probability == pytest.approx(np.prod(shares[np.arange(3, LENGTH), row[4:]]))


def test_drawn_characters_are_those_of_the_seed(trained: Trained) -> None:
    first, again, other = (next(continue_texts(trained, ["B"], seed)).continuation for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_texts_that_cannot_be_used_are_named(trained: Trained) -> None:
    strange, empty, long = continue_texts(trained, ["S1?", "", "S" * 80])
    assert strange.error is not None
    assert strange.error.startswith("'S1?': found '?'; expected characters of BCS([{<")
    assert empty.error == "'' has 0 tokens; expected 1 to 65"
    assert long.error is not None
    assert "has 80 tokens" in long.error


def test_only_tasks_of_texts_are_taken_for_such() -> None:
    assert reads_texts(TASK)
    assert not reads_texts(MNIST)
