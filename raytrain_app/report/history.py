"""The numbers of a run as columns, from metrics.jsonl: quick for millions of steps, and thinned out for drawing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from raytrain_app.errors import StorageError
from raytrain_app.storage import records
from raytrain_app.storage.rundir import METRICS, RunDirectory

Columns = Mapping[str, np.ndarray]

WHOLE = ("epoch", "step", "samples", "workers")
REAL = ("loss", "accuracy", "val_loss", "val_accuracy", "lr", "time")
BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class History:
    """All of a run's metrics.

    Attributes:
        steps: columns of the step lines, each of shape (steps,): `step`, `epoch`, `samples` and `workers` int64; `loss`,
            `accuracy`, `lr`, `time` (seconds since 1970) and whatever else the strategy records float64, NaN where a line does
            not have it.
        epochs: the same of the epoch lines, with `val_loss` and `val_accuracy`.
        size_bytes: bytes of metrics.jsonl that were read, all of them whole lines.
    """

    steps: Columns
    epochs: Columns
    size_bytes: int = 0

    @property
    def num_steps(self) -> int:
        """Step lines."""
        return len(self.steps["step"])


def read_history(directory: RunDirectory) -> History:
    """Reads metrics.jsonl of a run.

    Raises:
        StorageError: it cannot be read, or a line of it is not a JSON object.
    """
    return parse_history(
        directory.folder.read(METRICS) if directory.folder.exists(METRICS) else b"", directory.folder.at(METRICS)
    )


def parse_history(data: bytes, where: str) -> History:
    """Reads the content of a metrics.jsonl; an unfinished last line is left out.

    Args:
        data: the file's bytes.
        where: the file's name, for errors.
    """
    size = data.rfind(b"\n") + 1
    schema = pa.schema([("kind", pa.string()), *((key, pa.int64()) for key in WHOLE), *((key, pa.float64()) for key in REAL)])
    if not size:
        table = schema.empty_table()
    else:
        try:
            table = arrow_json.read_json(
                pa.py_buffer(memoryview(data)[:size]),
                read_options=arrow_json.ReadOptions(block_size=BLOCK_BYTES),
                parse_options=arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer"),
            )
        except pa.ArrowInvalid as error:
            records.parse(data, where)  # names the line that is no JSON object, if one is
            raise StorageError(f"{where} is damaged: {error}; restore the file or delete the line") from None
    return History(_columns(table, "step"), _columns(table, "epoch"), size)


def _columns(table: pa.Table, kind: str) -> Columns:
    rows = table.filter(pc.equal(table["kind"], kind))
    columns = {name: rows[name] for name in rows.column_names if _is_number(rows[name].type)}
    return {
        name: column.to_numpy() if name in WHOLE else column.cast(pa.float64()).to_numpy() for name, column in columns.items()
    }


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


# ---- thinning out ----


def smooth(x: np.ndarray, y: np.ndarray, points: int = 400, share: float = 0.02) -> tuple[np.ndarray, np.ndarray]:
    """A centred moving average over a share of the whole, at a limited number of places.

    Args:
        x: ascending, shape (n,).
        y: shape (n,); NaN is left out.
        points: the most places to return.
        share: of the n values that each average takes in, at the ends fewer.

    Returns:
        x and averages, each of shape (at most points,).
    """
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if not len(y):
        return x, y
    half = int(len(y) * share / 2)
    sums = np.concatenate([[0.0], np.cumsum(y, dtype=np.float64)])
    at = np.unique(np.linspace(0, len(y) - 1, min(points, len(y))).round().astype(np.int64))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(y))
    return x[at], (sums[high] - sums[low]) / (high - low)


def thin(x: np.ndarray, y: np.ndarray, points: int = 800) -> tuple[np.ndarray, np.ndarray]:
    """The same line to the eye with at most `points` points (4 or more): ends and extremes of each stretch stay."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(y) <= points:
        return x, y
    edges = np.linspace(0, len(y), (points - 2) // 2 + 1).astype(np.int64)
    keep = {0, len(y) - 1}
    for first, last in itertools.pairwise(edges):
        keep.add(int(first + np.argmin(y[first:last])))
        keep.add(int(first + np.argmax(y[first:last])))
    at = np.array(sorted(keep))
    return x[at], y[at]


@dataclass(frozen=True)
class RunClock:
    """Seconds that a run has been running: a run that was stopped and resumed days later has no days in it.

    Attributes:
        starts: when the run was started and resumed, seconds since 1970, ascending.
        ends: when it was last heard of after each of these.
    """

    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]], times: Sequence[float] | np.ndarray) -> RunClock:
        """From the records of events.jsonl and the times of the steps."""
        heard = np.sort(np.concatenate([np.asarray(times, np.float64), [event["time"] for event in events]]))
        if not len(heard):
            return cls(np.zeros(1), np.zeros(1))
        starts = np.array([event["time"] for event in events if event["kind"] == "start"] or heard[:1], np.float64)
        until = np.append(starts[1:], np.inf)
        ends = heard[np.maximum(np.searchsorted(heard, until, side="left") - 1, 0)]
        return cls(starts, np.maximum(ends, starts))

    def seconds(self, times: Iterable[float] | np.ndarray) -> np.ndarray:
        """Running seconds at the times given, float64."""
        at: np.ndarray = np.asarray(times, np.float64)
        before = np.concatenate([[0.0], np.cumsum(self.ends - self.starts)[:-1]])
        session = np.clip(np.searchsorted(self.starts, at, side="right") - 1, 0, len(self.starts) - 1)
        running: np.ndarray = before[session] + np.clip(at - self.starts[session], 0.0, (self.ends - self.starts)[session])
        return running

    @property
    def total_s(self) -> float:
        """All running seconds."""
        return float(np.sum(self.ends - self.starts))


def throughput(seconds: np.ndarray, samples: np.ndarray, total_s: float, points: int = 90) -> tuple[np.ndarray, np.ndarray]:
    """Samples a second over time.

    Args:
        seconds: running seconds at which each step was applied, ascending, shape (steps,).
        samples: rows applied up to each.
        total_s: how long the run has been running.
        points: the most stretches to cut the time into.

    Returns:
        The middle of each stretch, in seconds, and the rate in it.
    """
    if len(seconds) < 2 or total_s <= 0:
        return np.empty(0), np.empty(0)
    edges = np.linspace(0.0, total_s, max(1, min(points, len(seconds) // 4)) + 1)
    return (edges[:-1] + edges[1:]) / 2, np.diff(np.interp(edges, seconds, samples)) / np.diff(edges)
