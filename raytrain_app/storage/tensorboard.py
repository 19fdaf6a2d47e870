"""TensorBoard event files from the records of metrics.jsonl, written with TensorBoard's own record format.

`torch.utils.tensorboard` is not used: it loads TensorFlow wherever that is installed, for the sake of its file system.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raytrain_app.storage.folder import explained
from raytrain_app.storage.rundir import RunDirectory

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

NOT_SCALARS = ("kind", "epoch", "step", "time")


class TensorBoardWriter:
    """Writes a run's scalars below its `tensorboard/`; every number of a record becomes the scalar `<kind>/<key>`.

    Args:
        directory: of the run, inside `writing`.
    """

    def __init__(self, directory: RunDirectory) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        # The name that TensorBoard looks for; the time in it tells apart the files of a run that was resumed.
        path = directory.grow(f"tensorboard/events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}")
        self._where = str(path)
        with explained("write", self._where):
            self._writer = RecordWriter(path.open("ab"))
        self._write([Event(wall_time=time.time(), file_version="brain.Event:2")])

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes the scalars of records with a `kind` and a `step`.

        Raises:
            StorageError: the file cannot be written.
        """
        self._write(_event(record) for record in records if "step" in record)

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()

    def _write(self, events: Iterable[Event]) -> None:
        with explained("write", self._where):
            for event in events:
                self._writer.write(event.SerializeToString())
            self._writer.flush()


def _event(record: Mapping[str, Any]) -> Event:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=f"{record['kind']}/{key}", simple_value=value) for key, value in _scalars(record)]
    for key in record:
        if key.endswith("_counts"):
            values.append(Summary.Value(tag=f"{record['kind']}/{key.removesuffix('_counts')}", histo=_histogram(record[key])))
    return Event(wall_time=record.get("time", time.time()), step=record["step"], summary=Summary(value=values))


def _histogram(counts: Mapping[str, int]) -> HistogramProto:
    """A histogram from counts by the upper ends of its buckets."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    ends = [float(end) for end in counts]
    total = sum(end * count for end, count in zip(ends, counts.values(), strict=True))
    squares = sum(end * end * count for end, count in zip(ends, counts.values(), strict=True))
    return HistogramProto(
        min=0.0,
        max=ends[-1],
        num=float(sum(counts.values())),
        sum=total,
        sum_squares=squares,
        bucket_limit=ends,
        bucket=list(map(float, counts.values())),
    )


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if key not in NOT_SCALARS and isinstance(value, int | float) and math.isfinite(value):
            yield key, float(value)
