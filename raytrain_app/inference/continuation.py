"""How a trained language model goes on with a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raytrain_app.inference.trained import Trained
from raytrain_app.task import Task


@dataclass
class Continuation:
    """A text and what the model puts behind it, up to the length of a row.

    Attributes:
        text: as given.
        continuation: as the model would have it.
        probability: of the continuation, by the model.
        error: why the text could not be used.
    """

    text: str
    continuation: str = ""
    probability: float | None = None
    error: str | None = None


def reads_texts(task: Task) -> bool:
    """Whether the rows of a task are texts."""
    return type(task).encode is not Task.encode


def continue_texts(trained: Trained, texts: Sequence[str], seed: int | None = None) -> Iterator[Continuation]:
    """Goes on with each text, token by token.

    Args:
        trained: a model whose outputs at each place are scores of the next token: (rows, length, tokens).
        texts: the beginnings.
        seed: draws each token by its probability with this seed; None takes the most probable one.
    """
    length = trained.task.columns.shape[0]
    for text in texts:
        try:
            known = trained.task.encode(text)
        except ValueError as error:
            yield Continuation(text, error=f"{text!r}: {error}")
            continue
        if not 0 < len(known) <= length:
            yield Continuation(text, error=f"{text!r} has {len(known)} tokens; expected 1 to {length}")
            continue
        row = np.zeros(length, trained.task.columns.dtype)
        row[: len(known)] = known
        rng, probability = np.random.default_rng(seed), 1.0
        for place in range(len(known), length):
            shares = trained.probabilities(row[None])[0, place - 1]
            token = int(shares.argmax()) if seed is None else int(rng.choice(len(shares), p=shares))
            row[place], probability = token, probability * float(shares[token])
        yield Continuation(text, trained.task.decode(row[len(known) :]), probability)
