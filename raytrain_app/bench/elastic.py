"""What changes of the cluster cost: the product and stock elastic Ray Train, under the same events, in one go.

Both train for 20 ms a step on nodes of this machine. The product's figures are medians over repeats, taken from the times
of the steps as the workers' clocks have them. Stock Ray Train takes part in the events that it knows; each costs it up to a
minute and more, so it has repeats of its own.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import ray

from raytrain_app.bench.stock_elastic import StockRun
from raytrain_app.bench.watched import Step, WatchedRun
from raytrain_app.cluster.local import LocalNodes
from raytrain_app.cluster.nodes import living_nodes
from raytrain_app.job import job_from_dict
from raytrain_app.report.updates import Update
from raytrain_app.session import NAMESPACE
from raytrain_app.storage.requests import Request

HEARTBEAT_S = 5.0
"""`failure.heartbeat_s` for workers that hang; the others are measured with its default."""
PACE_STEPS = 20
"""Steps whose time says how long one takes."""
SETTLED_S = 0.1
"""A step that was under way when all workers were killed may still have been told within this time."""
EVENTS = {
    "kill": "a worker is killed: to the next step",
    "join": "its replacement joins: pause",
    "leave": "a worker leaves as planned: pause",
    "return": "a worker comes back: pause",
    "node_lost": "a node is lost: to the next step",
    "node_joins": "a new node: to the first step with it",
    "all_lost": "all workers killed: to the next step",
    "hang": f"a worker hangs, heartbeat_s {HEARTBEAT_S:g}: to the next step",
}
"""What is measured, in seconds. Times run from the fault, or from the node's arrival in Ray; pauses are gaps between steps."""
LIMITS = {"kill": 1.0, "join": 0.3, "leave": 0.3, "return": 0.3, "node_lost": 2.0, "node_joins": 10.0, "all_lost": 12.0}
"""What the product promises on two idle cores, as medians."""
WAIT_S = 120.0


@dataclass(frozen=True)
class Session:
    """A run that is disturbed in some of these ways; each worker has a node to itself."""

    disturbances: tuple[str, ...]
    workers: int = 2
    heartbeat_s: float = 30.0


SESSIONS = (
    Session(("kill", "leave", "all")),
    # With three nodes of which the oldest is lost, none dies young, for which the next ones would have to wait longer.
    Session(("node",), workers=3),
    Session(("hang",), heartbeat_s=HEARTBEAT_S),
)


@dataclass
class Figures:
    """Seconds, and the most steps that were redone, by event; `tell` hears of each measurement."""

    tell: Callable[[str], None]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    redone: dict[str, int] = field(default_factory=dict)

    def add(self, event: str, seconds: float, redone: int = 0) -> None:
        """One more measurement."""
        self.tell(f"  {EVENTS[event]:<50} {seconds:6.2f} s")
        self.seconds.setdefault(event, []).append(seconds)
        self.redone[event] = max(self.redone.get(event, 0), redone)


def lines(product: Figures, stock: Figures) -> list[str]:
    """A table for people, with ratios where stock Ray Train was measured."""
    rows = []
    for event, ours in product.seconds.items():
        median = statistics.median(ours)
        row = f"{EVENTS[event]:<50} median {median:5.2f} s of {len(ours):2}, longest {max(ours):5.2f} s"
        row += f", {product.redone[event]:2} steps redone"
        if event in LIMITS:
            row += f", {'within' if median <= LIMITS[event] else 'OVER'} {LIMITS[event]:g} s"
        if event in stock.seconds:
            theirs = statistics.median(stock.seconds[event])
            row += f"; stock Ray Train {theirs:5.1f} s, {stock.redone[event]} redone: {theirs / median:.0f} times as long"
        rows.append(row)
    return rows


class _Run(WatchedRun):
    """The product's run, which goes on until it is stopped."""

    def __init__(self, storage: str, session: Session) -> None:
        self.workers = session.workers
        self.resumed: list[int] = []
        raw = {
            "name": "bench-elastic",
            "task": "raytrain_app.bench.slow_task:TASK",
            "model": {"name": "linear"},
            "train": {"epochs": 1_000_000, "global_batch_size": 40, "virtual_shards": session.workers},
            "scaling": {"workers": f"1..{session.workers}"},
            "failure": {"max_restarts": 1_000_000, "heartbeat_s": session.heartbeat_s},
            "checkpoint": {"every_steps": 1_000_000},
            "storage": storage,
            "tensorboard": False,
        }
        super().__init__(job_from_dict(raw))

    def there(self) -> list[dict[str, Any]]:
        """The join events of the workers that are there, oldest first."""
        gone = {event["worker"] for event in self.events if event["kind"] in ("worker_lost", "node_lost", "leave")}
        return [event for event in self.events if event["kind"] == "join" and event["worker"] not in gone]

    def first_step(self, after_s: float, workers: int | None = None) -> Step:
        """The first step after a time, with that many workers if given."""
        return self.steps[self._first(after_s, workers)]

    def pause(self, after_s: float, workers: int) -> float:
        """The gap before the first step after a time with that many workers."""
        place = self._first(after_s, workers)
        return self.steps[place].time_s - self.steps[place - 1].time_s

    def redone(self, at_s: float) -> int:
        """Steps redone for what happened at a time: those that were done by then, beyond where a later process went on.

        The last of them, for which the workers' lives were too short to tell of them, are known by their pace.
        """
        before = [step for step in self.steps if step.time_s <= at_s][-PACE_STEPS:]
        resumed, self.resumed = self.resumed, []
        if not resumed:
            return 0
        pace_s = statistics.median(after.time_s - step.time_s for step, after in itertools.pairwise(before))
        return max(0, before[-1].step + int((at_s - before[-1].time_s) / pace_s) - min(resumed))

    def _first(self, after_s: float, workers: int | None) -> int:
        def found() -> list[int]:
            # Steps that were told late, after their workers' death, are out of order: none is looked up by its place.
            known = list(enumerate(self.steps))
            return [n for n, step in known if step.time_s > after_s and workers in (None, step.workers)][:1]

        return int(self.until(found, f"a step with {workers} workers")[0])

    def _watch(self, update: Update) -> None:
        super()._watch(update)
        if update.kind == "event" and update.record["kind"] == "resume":
            self.resumed.append(update.record["step"])


def measure_product(repeats: int, disturbances: Collection[str], tell: Callable[[str], None]) -> Figures:
    """Measures "kill", "leave", "node", "all" and "hang", or some of them, `repeats` times each."""
    figures, rng = Figures(tell), random.Random(0)
    for session in SESSIONS:
        chosen = [disturbance for disturbance in session.disturbances if disturbance in disturbances]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as storage, LocalNodes(session.workers, {"CPU": 1}) as nodes:
            ray.init(address=nodes.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
            run = _Run(storage, session)
            try:
                for disturbance in chosen:
                    for number in range(repeats):
                        run.first_step(time.time(), session.workers)
                        tell(f"{disturbance} {number + 1} of {repeats}")
                        time.sleep(rng.random())
                        _disturb(disturbance, run, figures, nodes)
            finally:
                run.stop()
                ray.shutdown()
    return figures


def _disturb(disturbance: str, run: _Run, figures: Figures, nodes: LocalNodes) -> None:
    if disturbance == "leave":
        _leave_and_return(run, figures)
    elif disturbance == "node":
        _lose_node(run, figures, nodes)
    elif disturbance == "all":
        _lose_all(run, figures)
    else:
        _strike(disturbance, run, figures)


def _strike(disturbance: str, run: _Run, figures: Figures) -> None:
    """Kills or stops either worker."""
    pid = random.choice(run.there())["pid"]
    at_s = time.time()
    os.kill(pid, signal.SIGSTOP if disturbance == "hang" else signal.SIGKILL)
    alone_s = run.first_step(at_s, run.workers - 1).time_s
    figures.add(disturbance, alone_s - at_s, run.redone(at_s))
    if disturbance == "kill":
        figures.add("join", run.pause(alone_s, run.workers), run.redone(alone_s))


def _leave_and_return(run: _Run, figures: Figures) -> None:
    for most, event in ((run.workers - 1, "leave"), (run.workers, "return")):
        at_s = time.time()
        run.ask(Request(kind="scale", least=1, most=most))
        figures.add(event, run.pause(at_s, most), run.redone(at_s))


def _lose_node(run: _Run, figures: Figures, nodes: LocalNodes) -> None:
    node_id = run.there()[0]["node"]
    before = {node.node_id for node in living_nodes()}
    at_s = time.time()
    nodes.remove(node_id)
    # Its worker may train on until it notices that its raylet is gone; what counts is the first step without it.
    alone_s = run.first_step(at_s, run.workers - 1).time_s
    figures.add("node_lost", alone_s - at_s, run.redone(at_s))
    threading.Thread(target=nodes.add).start()
    run.until(lambda: {node.node_id for node in living_nodes()} - before, "the new node")
    arrived_s = time.time()
    joined_s = run.first_step(max(arrived_s, alone_s), run.workers).time_s
    figures.add("node_joins", joined_s - arrived_s, run.redone(arrived_s))


def _lose_all(run: _Run, figures: Figures) -> None:
    run.resumed.clear()
    at_s = time.time()
    for worker in run.there():
        os.kill(worker["pid"], signal.SIGKILL)
    run.until(lambda: run.resumed, "going on from memory")
    figures.add("all_lost", run.first_step(at_s + SETTLED_S).time_s - at_s, run.redone(at_s))


def measure_stock(repeats: int, disturbances: Collection[str], tell: Callable[[str], None]) -> Figures:
    """The same for stock elastic Ray Train: a worker killed, a node that joins, a node that is lost."""
    events = ["kill"] if "kill" in disturbances else []
    events += ["node_lost", "node_joins"] if "node" in disturbances else []
    figures = Figures(tell)
    for event in events:
        for number in range(repeats):
            tell(f"stock Ray Train: {event} {number + 1} of {repeats}")
            with LocalNodes(1 if event == "node_joins" else 2, {"CPU": 1}) as nodes:
                seconds, redone = StockRun(nodes).measure(event)
            figures.add(event, seconds, redone)
    return figures
