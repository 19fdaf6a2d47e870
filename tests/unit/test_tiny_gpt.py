"""The small language model: a language of known probability, and a decoder that sees only what comes before."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytrain_app.errors import JobError
from raytrain_app.job import job_from_dict
from raytrain_app.learners.torch import TorchLearner
from raytrain_app.learners.torch_parts import prepare_process
from raytrain_app.tasks.small_language import CHARACTERS, LENGTH, decode, encode, surprise, write
from raytrain_app.tasks.tiny_gpt import TASK, Gpt


def test_all_that_is_written_is_in_the_language() -> None:
    tokens, kinds = write(600, 3)
    assert tokens.shape == (600, 1 + LENGTH)
    assert np.isfinite(surprise(tokens)).all()
    assert [CHARACTERS[code] for code in tokens[:, 0]] == ["BCS"[kind] for kind in kinds]
    assert np.array_equal(encode(decode(tokens[0])), tokens[0])


@given(st.integers(0, 59), st.integers(1, LENGTH), st.integers(1, len(CHARACTERS) - 1))
def test_one_wrong_character_is_enough_to_leave_the_language(row: int, place: int, by: int) -> None:
    tokens, _ = write(60, 4)
    changed = tokens[[row]]
    changed[0, place] = (changed[0, place] + by) % len(CHARACTERS)
    assert math.isinf(surprise(changed)[0])


def test_surprise_is_that_of_free_choices() -> None:
    text = "()" * (LENGTH // 2)
    # 32 times one of four sorts; at depth one both ways are open, but for the last place, where it must close.
    expected = 32 * math.log(4) + 31 * math.log(2)
    assert surprise(encode("B" + text)[None])[0] == pytest.approx(expected)
    assert surprise(encode("S" + "12=3" * 16)[None])[0] == pytest.approx(32 * math.log(10))
    assert surprise(encode("C" + "abcdefg=abcdefg;" * 4)[None])[0] == pytest.approx(28 * math.log(8))


def test_brackets_open_and_close_with_equal_chance() -> None:
    tokens, kinds = write(3000, 5)
    texts = tokens[kinds == 0, 1:]
    opens = np.isin(texts, encode("([{<"))
    depth = np.cumsum(np.where(opens, 1, -1), axis=1)
    free = (depth[:, :-1] > 0) & (depth[:, :-1] < LENGTH - np.arange(1, LENGTH))
    assert opens[:, 1:][free].mean() == pytest.approx(0.5, abs=0.01)


def test_outputs_depend_on_earlier_characters_alone() -> None:
    torch.manual_seed(0)
    model = TASK.torch_model("gpt", Gpt(layers=2, width=16, heads=2, dropout=0.0))
    tokens = torch.randint(0, len(CHARACTERS), (2, LENGTH))
    other = tokens.clone()
    other[:, 40:] = 0
    with torch.no_grad():
        before, after = model(tokens), model(other)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_loss_and_accuracy_are_those_of_a_character() -> None:
    x, y = write(10, 6)
    rows = torch.from_numpy(x)
    targets = TASK.torch_targets(rows, torch.from_numpy(y))
    known = torch.nn.functional.one_hot(targets, len(CHARACTERS)).double()
    assert float(TASK.torch_loss(torch.zeros_like(known), targets)) == pytest.approx(10 * math.log(len(CHARACTERS)))
    known[:, : LENGTH // 4] = 0
    known[:, : LENGTH // 4, 0] = 1  # "B", which is never right
    assert float(TASK.torch_correct(known, targets)) == pytest.approx(7.5)
    assert TASK.least_loss((x, y)) == pytest.approx(surprise(x).mean() / LENGTH)


def test_a_learner_gets_better_at_it() -> None:
    job = job_from_dict({"name": "gpt", "task": "tiny_gpt", "model": {"name": "gpt", "layers": 1, "width": 32, "heads": 2}})
    prepare_process(job)
    learner = TorchLearner(job, TASK, torch.device("cpu"))
    x, y = write(32, 7)
    losses = []
    for step in range(30):
        shard = learner.shard(x, y, step)
        losses.append(float(shard.scores[0]) / len(y))
        learner.apply(shard.vector / len(y), shard.counters, 0.01)
    assert losses[0] == pytest.approx(math.log(len(CHARACTERS)), rel=0.2)
    assert losses[-1] < 0.8 * losses[0]


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(JobError, match=r"model\.width: found 30; expected a multiple of 2 \* heads, which is 8"):
        TASK.torch_model("gpt", Gpt(layers=1, width=30, heads=4, dropout=0.0))
