"""What the records of a run come to, added up as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

RATE_WINDOW_S = 10.0
"""Over how long a rate is taken."""
PRESENT = ("waiting", "training", "parked")
"""States of workers that are there."""
_PLACE = ("kind", "epoch", "step", "samples", "tokens", "time", "workers")

Record = Mapping[str, Any]


@dataclass
class Member:
    """A worker, as the events tell.

    Attributes:
        worker: its id.
        pool: number of the pool that started it.
        node: Ray's id of its node.
        pid: its process id.
        state: "waiting" for a generation, "training", "parked", "left" or "lost".
        since: when it came into that state, seconds since 1970.
        clock: how far its replica is, in steps and epoch ends; None where that is not known.
    """

    worker: str
    pool: int
    node: str
    pid: int
    state: str
    since: float
    clock: int | None = None


class Summary:
    """What the records seen so far come to."""

    def __init__(self) -> None:
        self.step = self.epoch = self.samples = self.workers = 0
        self.metrics: dict[str, float] = {}
        self.started: float | None = None
        self.updated: float | None = None
        self.members: dict[str, Member] = {}
        self.disruptions: list[dict[str, Any]] = []
        self.checkpoint: int | None = None
        self.servers: Record | None = None
        self._steps_per_epoch: int | None = None
        self._recent: list[Record] = []

    def add(self, metrics: Iterable[Record], events: Iterable[Record]) -> None:
        for record in metrics:
            if record["kind"] == "servers":
                self.servers = record
                continue
            self.step, self.samples, self.workers = record["step"], record["samples"], record["workers"]
            self._heard(record["time"])
            if record["kind"] == "epoch":
                self._steps_per_epoch = record["step"] // record["epoch"]
            else:
                self.epoch = record["epoch"]
                self._recent.append(record)
            self.metrics.update({name: value for name, value in record.items() if name not in _PLACE and value is not None})
        if self._recent:
            newest_s = self._recent[-1]["time"]
            self._recent = [record for record in self._recent if record["time"] > newest_s - RATE_WINDOW_S]
        for event in events:
            self._heard(event["time"])
            self._event(event)

    def total_steps(self, epochs: int) -> int | None:
        """Steps of the whole run, once an epoch has ended."""
        return None if self._steps_per_epoch is None else self._steps_per_epoch * epochs

    def rate(self, count: str) -> float | None:
        """Growth of a count a second, over the last seconds that were heard of."""
        if len(self._recent) < 2 or count not in self._recent[0]:
            return None
        first, last = self._recent[0], self._recent[-1]
        spent_s = last["time"] - first["time"]
        return (last[count] - first[count]) / spent_s if spent_s > 0 else None

    def _heard(self, time_s: float) -> None:
        self.updated = max(self.updated or time_s, time_s)

    def _event(self, event: Record) -> None:
        kind = event["kind"]
        if kind == "start":
            self.started = self.started or event["time"]
            for member in self.members.values():  # of an earlier session, whose driver did not say so
                self._move(member, "left", event["time"])
        elif kind == "join":
            self.members[event["worker"]] = Member(
                event["worker"], event["pool"], event["node"], event["pid"], "training", event["time"]
            )
        elif kind in ("leave", "park", "unpark", "worker_lost", "node_lost") and event.get("worker") in self.members:
            state = {"leave": "left", "park": "parked", "unpark": "training"}.get(kind, "lost")
            self._move(self.members[event["worker"]], state, event["time"])
        elif kind in ("pool_retire", "pool_abort"):  # workers that were in no generation yet leave without a word
            for member in self.members.values():
                if member.pool == event["pool"] and member.state in PRESENT:
                    self._move(member, "left", event["time"])
        elif kind == "generation":
            self.workers = event["workers"]
        elif kind == "checkpoint":
            self.checkpoint = event["step"]
        elif kind == "disruption":
            self.disruptions.append(event["receipt"])
        elif kind == "finish":
            for member in self.members.values():
                self._move(member, "left", event["time"])

    def _move(self, member: Member, state: str, time_s: float) -> None:
        if member.state in ("training", "parked"):
            member.state, member.since = state, time_s
