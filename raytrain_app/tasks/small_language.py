"""A made-up language with an exact probability for every text, so that the best possible loss of a model is known.

A text is a letter for its kind and 64 characters:

- B: nested brackets of four sorts, all of them closed at the end. While both are possible the next one opens or closes
  with equal chance; which bracket closes is certain.
- C: four times seven letters, `=`, the same letters again, `;`. Half of it is certain.
- S: sixteen sums `ab=c`, where c is (a + b) mod 10, written without spaces. Half of it is certain.
"""

from __future__ import annotations

import math

import numpy as np

KINDS, OPENING, CLOSING, LETTERS, DIGITS = "BCS", "([{<", ")]}>", "abcdefgh", "0123456789"
CHARACTERS = KINDS + OPENING + CLOSING + LETTERS + DIGITS + "=;"
"""A token is a character's place in here."""
LENGTH = 64
"""Characters of a text after the letter of its kind."""
WORD = 7

_CODES = {character: code for code, character in enumerate(CHARACTERS)}
_OPENING, _CLOSING, _LETTERS, _DIGITS = (_CODES[characters[0]] for characters in (OPENING, CLOSING, LETTERS, DIGITS))


def encode(text: str) -> np.ndarray:
    """Tokens of a text, uint8 (characters,). Raises ValueError for a character that the language does not have."""
    strange = [character for character in text if character not in _CODES]
    if strange:
        raise ValueError(f"found {strange[0]!r}; expected characters of {CHARACTERS}")
    return np.array([_CODES[character] for character in text], np.uint8)


def decode(tokens: np.ndarray) -> str:
    """The text of tokens (characters,)."""
    return "".join(CHARACTERS[token] for token in tokens)


def write(num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes texts.

    Returns:
        Tokens, uint8 (num_rows, 1 + LENGTH), and the number of each text's kind, int64 (num_rows,).
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    kinds = rng.integers(0, len(KINDS), num_rows)
    tokens = np.empty((num_rows, 1 + LENGTH), np.uint8)
    tokens[:, 0] = kinds
    for kind, rule in enumerate((_brackets, _copies, _sums)):
        tokens[kinds == kind, 1:] = rule(int((kinds == kind).sum()), rng)
    return tokens, kinds


def surprise(tokens: np.ndarray) -> np.ndarray:
    """How improbable texts are, given their kinds: -ln p; infinite for what is not in the language.

    Args:
        tokens: (rows, 1 + LENGTH).

    Returns:
        float64 (rows,), in nats. Its mean over texts, divided by LENGTH, is the loss of a perfect model.
    """
    given = {"B": _bracket_surprise, "C": _copy_surprise, "S": _sum_surprise}
    nats = np.full(len(tokens), math.inf)
    for kind, rule in given.items():
        rows = tokens[:, 0] == _CODES[kind]
        if rows.any():
            nats[rows] = rule(tokens[rows, 1:].astype(np.int64))
    return nats


def _brackets(num_rows: int, rng: np.random.Generator) -> np.ndarray:
    out = np.zeros((num_rows, LENGTH), np.int64)
    rows, depth = np.arange(num_rows), np.zeros(num_rows, np.int64)
    stack = np.zeros((num_rows, LENGTH // 2), np.int64)
    for place in range(LENGTH):
        opens = (depth == 0) | ((depth < LENGTH - place) & (rng.random(num_rows) < 0.5))
        sort = np.where(opens, rng.integers(0, len(OPENING), num_rows), stack[rows, depth - 1])
        stack[rows[opens], depth[opens]] = sort[opens]
        out[:, place] = np.where(opens, _OPENING, _CLOSING) + sort
        depth += np.where(opens, 1, -1)
    return out


def _bracket_surprise(texts: np.ndarray) -> np.ndarray:
    rows, depth, nats = np.arange(len(texts)), np.zeros(len(texts), np.int64), np.zeros(len(texts))
    stack = np.zeros((len(texts), LENGTH + 1), np.int64)
    for place in range(LENGTH):
        sort = texts[:, place] - _OPENING
        opens = (sort >= 0) & (sort < len(OPENING))
        sort = np.where(opens, sort, texts[:, place] - _CLOSING)
        closes = ~opens & (depth > 0) & (sort == stack[rows, depth - 1])
        free = (depth > 0) & (depth < LENGTH - place)
        nats += np.where(free, math.log(2), 0.0) + np.where(opens, math.log(len(OPENING)), 0.0)
        nats[~(opens & (depth < LENGTH - place)) & ~closes] = math.inf
        stack[rows[opens], depth[opens]] = sort[opens]
        depth = np.maximum(depth + np.where(opens, 1, -1), 0)
    return nats


def _copies(num_rows: int, rng: np.random.Generator) -> np.ndarray:
    words = rng.integers(_LETTERS, _LETTERS + len(LETTERS), (num_rows, LENGTH // (2 * WORD + 2), WORD))
    ends = np.ones((*words.shape[:2], 1), np.int64)
    return np.concatenate([words, _CODES["="] * ends, words, _CODES[";"] * ends], axis=2).reshape(num_rows, LENGTH)


def _copy_surprise(texts: np.ndarray) -> np.ndarray:
    groups = texts.reshape(len(texts), -1, 2, WORD + 1)
    words, ends = groups[..., :WORD], groups[..., WORD]
    right = ((words >= _LETTERS) & (words < _LETTERS + len(LETTERS))).all((1, 2, 3)) & (words[:, :, 0] == words[:, :, 1]).all(
        (1, 2)
    )
    right &= (ends == [_CODES["="], _CODES[";"]]).all((1, 2))
    return np.where(right, LENGTH // (2 * WORD + 2) * WORD * math.log(len(LETTERS)), math.inf)


def _sums(num_rows: int, rng: np.random.Generator) -> np.ndarray:
    a, b = rng.integers(0, len(DIGITS), (2, num_rows, LENGTH // 4))
    equals = np.full_like(a, _CODES["="] - _DIGITS)
    return np.stack([a, b, equals, (a + b) % len(DIGITS)], axis=2).reshape(num_rows, LENGTH) + _DIGITS


def _sum_surprise(texts: np.ndarray) -> np.ndarray:
    a, b, equals, c = (texts.reshape(len(texts), -1, 4) - _DIGITS).transpose(2, 0, 1)
    digits = ((np.stack([a, b]) >= 0) & (np.stack([a, b]) < len(DIGITS))).all((0, 2))
    right = digits & (equals == _CODES["="] - _DIGITS).all(1) & (c == (a + b) % len(DIGITS)).all(1)
    return np.where(right, LENGTH // 4 * 2 * math.log(len(DIGITS)), math.inf)
