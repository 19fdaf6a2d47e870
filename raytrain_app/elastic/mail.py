"""What the membership tells: to workers, signals; to the driver, mail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raytrain_app.elastic.roster import Standing
from raytrain_app.errors import RaytrainError

Dated = tuple[int | None, dict[str, Any]]
"""A record and the clock after what it tells was applied; None for events."""


@dataclass(frozen=True)
class Signals:
    """What a worker must know at its next step boundary.

    Attributes:
        incarnation: changes when the actor was restarted, which has forgotten undelivered records.
        version: changes with any of the others.
        join: a worker waits that the current generation does not know of.
        leave: this worker is asked to leave.
        checkpoint, stop: asked of the run.
        abort: the run is over, or this worker was evicted; it ends at once.
        recorded: clock up to which the driver has written the step records.
        broken: number of the newest generation that lost a member.
    """

    incarnation: str = ""
    version: int = 0
    join: bool = False
    leave: bool = False
    checkpoint: bool = False
    stop: bool = False
    abort: bool = False
    recorded: int = 0
    broken: int = 0


@dataclass(frozen=True)
class WorkerView:
    """A worker that is not gone, as the driver sees it."""

    worker_id: str
    pool: int
    node_id: str
    pid: int
    standing: Standing
    clock: int


@dataclass
class Mail:
    """What the driver gets from one call: records since the last one, and where the run stands.

    Attributes:
        records: in the order in which they were taken.
        failure: what ended the run, if it failed.
        summaries: one a worker that finished, once the run is over.
        workers: all that are there now.
        incarnation: changes when the actor was restarted, which has forgotten what was asked of it.
        stopping: a stop was asked for.
        generation: number of the current generation; 0 before the first.
        lost_nodes: ids of nodes that are gone, of which Ray itself may not know yet.
        seconds: lifetimes of all workers there ever were, added up by class.
    """

    records: list[Dated] = field(default_factory=list)
    failure: RaytrainError | None = None
    summaries: list[dict[str, Any]] = field(default_factory=list)
    workers: list[WorkerView] = field(default_factory=list)
    incarnation: str = ""
    stopping: bool = False
    generation: int = 0
    lost_nodes: frozenset[str] = frozenset()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def has_events(self) -> bool:
        """Whether it tells of more than steps and epochs."""
        return any(clock is None for clock, _ in self.records)
