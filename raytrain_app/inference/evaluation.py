"""What a trained model gets right and wrong on rows with known labels: exact, and the same bits however it is computed.

Rows are cut into the shards of training, and each shard into batches. A batch is scored anywhere; its float64 sums are
added in the order of the batches within a shard and along the tree of `elastic.plan` over the shards. So the loss and the
accuracy of the test rows are the very numbers of result.json, for any number of workers.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytrain_app.elastic.plan import children, shard_rows
from raytrain_app.elastic.reduce import NUM_SCORES
from raytrain_app.inference.trained import BATCH_ROWS, Trained
from raytrain_app.task import Rows

WORST = 24
"""Mistakes that an evaluation keeps."""
MOST_CLASSES = 256
"""Classes up to which an evaluation holds the whole confusion matrix."""


@dataclass
class Mistake:
    """A row that was taken for another class.

    Attributes:
        row: its number among the rows evaluated.
        label, prediction: class numbers, from 0.
        probability: of the class it was taken for; probability_of_label: of its own.
        x: the row, as stored.
    """

    row: int
    label: int
    prediction: int
    probability: float
    probability_of_label: float
    x: np.ndarray


@dataclass
class Scored:
    """A batch, scored.

    Attributes:
        scores: the learner's float64 sums: loss, rows predicted correctly, and what else it sums up.
        confusion: rows by true class and predicted class, None where the outputs are no classes.
        mistakes: the worst of the batch.
    """

    scores: np.ndarray
    confusion: np.ndarray | None = None
    mistakes: list[Mistake] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """Rows [start, stop) of all rows, scored together."""

    shard: int
    start: int
    stop: int


def batches(num_rows: int, num_shards: int) -> list[Batch]:
    """All batches, in the order in which their sums are added."""
    return [
        Batch(shard, start, min(start + BATCH_ROWS, rows.stop))
        for shard in range(num_shards)
        for rows in [shard_rows(num_rows, num_shards, shard)]
        for start in range(rows.start, rows.stop, BATCH_ROWS)
    ]


def score(trained: Trained, x: np.ndarray, y: np.ndarray, first_row: int) -> Scored:
    """Scores one batch.

    Args:
        trained: the model.
        x: (rows, *shape) as stored; y: int64 (rows,).
        first_row: number of the batch's first row among all.
    """
    scores = trained.learner.evaluate(x, y).cpu().numpy().astype(np.float64)
    probabilities = trained.probabilities(x)
    if probabilities.ndim != 2 or probabilities.shape[1] != trained.num_classes:
        return Scored(scores)
    predictions = probabilities.argmax(axis=1)
    classes = trained.num_classes
    confusion = np.bincount(y * classes + predictions, minlength=classes * classes).reshape(classes, classes)
    mistakes = [
        Mistake(
            first_row + int(row),
            int(y[row]),
            int(predictions[row]),
            float(probabilities[row, predictions[row]]),
            float(probabilities[row, y[row]]),
            x[row],
        )
        for row in np.flatnonzero(predictions != y)
    ]
    return Scored(scores, confusion, worst(mistakes))


def worst(mistakes: Iterable[Mistake]) -> list[Mistake]:
    """The mistakes whose true class was given the least probability, the worst first."""
    return sorted(mistakes, key=lambda mistake: (mistake.probability_of_label, mistake.row))[:WORST]


def score_all(trained: Trained, rows: Rows, tell: Callable[[int], None] = lambda done: None) -> list[Scored]:
    """Scores all rows in this process; `tell` hears how many are done."""
    x, y = rows
    scored = []
    for batch in batches(len(y), trained.job.num_shards):
        place = slice(batch.start, batch.stop)
        scored.append(score(trained, x[place], y[place], batch.start))
        tell(batch.stop)
    return scored


def add_up(num_rows: int, num_shards: int, scored: Sequence[Scored]) -> Scored:
    """The sums over all rows, from those of all batches in their order."""
    width = len(scored[0].scores)
    shards = np.zeros((num_shards, width))
    for batch, part in zip(batches(num_rows, num_shards), scored, strict=True):
        shards[batch.shard] += part.scores
    matrices = [part.confusion for part in scored if part.confusion is not None]
    confusion = np.sum(matrices, axis=0) if len(matrices) == len(scored) else None
    return Scored(_tree_sum(shards, (0, num_shards)), confusion, worst(m for part in scored for m in part.mistakes))


def _tree_sum(shards: np.ndarray, node: tuple[int, int]) -> np.ndarray:
    if node[1] - node[0] == 1:
        return np.asarray(shards[node[0]])
    left, right = children(node)
    return np.asarray(_tree_sum(shards, left) + _tree_sum(shards, right))


# ---- the record ----


def record(trained: Trained, split: str, source: str, num_rows: int, total: Scored) -> dict[str, Any]:
    """An evaluation as JSON values; labels are those of the data.

    Returns:
        `split`, `source`, `checkpoint`, `weights_sha256`, `rows`, `correct`, `loss` and `accuracy`; `metrics` of the
        task's own; `classes` with rows,
        precision, recall and f1 of each (null where there is nothing to divide by); `confusion[true][predicted]`, null for
        more than `MOST_CLASSES` classes; `mistakes`, the worst first, each with its image where rows are images.
    """
    loss, correct = (float(score) for score in total.scores[:2])
    values: dict[str, Any] = {
        "split": split,
        "source": source,
        "checkpoint": trained.checkpoint,
        "weights_sha256": trained.sha256,
        "rows": num_rows,
        "correct": int(correct) if correct.is_integer() else correct,
        "loss": loss / num_rows,
        "accuracy": correct / num_rows,
        "metrics": trained.learner.metrics(total.scores[NUM_SCORES:].tolist()),
        "classes": None,
        "confusion": None,
        "mistakes": [_mistake(trained, mistake) for mistake in total.mistakes],
    }
    if total.confusion is not None:
        values["classes"] = list(_classes(trained, total.confusion))
        values["confusion"] = total.confusion.tolist() if trained.num_classes <= MOST_CLASSES else None
    return values


def _classes(trained: Trained, confusion: np.ndarray) -> Iterator[dict[str, Any]]:
    for number in range(len(confusion)):
        right = int(confusion[number, number])
        rows, said = int(confusion[number].sum()), int(confusion[:, number].sum())
        yield {
            "label": trained.label(number),
            "rows": rows,
            "precision": right / said if said else None,
            "recall": right / rows if rows else None,
            "f1": 2 * right / (rows + said) if rows + said else None,
        }


def _mistake(trained: Trained, mistake: Mistake) -> dict[str, Any]:
    return {
        "row": mistake.row,
        "label": trained.label(mistake.label),
        "prediction": trained.label(mistake.prediction),
        "probability": mistake.probability,
        "probability_of_label": mistake.probability_of_label,
        "image": picture_of(mistake.x),
    }


def picture_of(x: np.ndarray) -> str | None:
    """A row as a PNG in a data: URI, None where it is no image."""
    from PIL import Image

    if x.ndim == 3 and x.shape[-1] == 1:
        x = x[..., 0]
    is_image = x.dtype == np.uint8 and (x.ndim == 2 or (x.ndim == 3 and x.shape[-1] == 3))
    if not is_image or max(x.shape) > 512:
        return None
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(x)).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
