"""What changes of the cluster cost: the product and stock elastic Ray Train, under the same events, in one go.

Both train for 20 ms a step on nodes of this machine. The product's figures are medians over repeats, taken from the times
of the steps as the workers' clocks have them; stock Ray Train is measured once an event, since each costs it a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from raytrain_app import runner
from raytrain_app.bench.stock_elastic import StockRun
from raytrain_app.cluster.local import LocalNodes
from raytrain_app.cluster.nodes import living_nodes
from raytrain_app.errors import Interrupted
from raytrain_app.job import job_from_dict
from raytrain_app.report.updates import Update
from raytrain_app.session import NAMESPACE
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.requests import Request, Requests

EVENTS = {
    "kill": "a worker is killed",
    "join": "its replacement joins",
    "leave": "a worker leaves as planned",
    "return": "a worker comes back",
    "node_lost": "a node is lost (its raylet is killed)",
    "node_joins": "a new node is used",
    "all_lost": "all workers are killed at once",
}
WAIT_S = 120.0


@dataclass
class Figures:
    """Seconds by event, each from the event to the next step, but for "join", "leave", "return": the pause in stepping.

    "node_joins" is from the node's arrival in Ray to the first step with its worker.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    redone: dict[str, int] = field(default_factory=dict)

    def add(self, event: str, seconds: float, redone: int = 0) -> None:
        """One more measurement."""
        self.seconds.setdefault(event, []).append(seconds)
        self.redone[event] = max(self.redone.get(event, 0), redone)


def lines(product: Figures, stock: Figures) -> list[str]:
    """A table for people, with ratios where stock Ray Train was measured."""
    rows = []
    for event, text in EVENTS.items():
        ours = product.seconds.get(event)
        if not ours:
            continue
        spread = f"median {statistics.median(ours):6.2f} s of {len(ours):2}, longest {max(ours):6.2f} s"
        row = f"{text:<38} {spread}, {product.redone[event]:3} steps redone"
        theirs = stock.seconds.get(event)
        if theirs:
            ratio = statistics.median(theirs) / statistics.median(ours)
            row += f"   stock {theirs[0]:6.2f} s, {stock.redone[event]} redone: {ratio:.0f} times as long"
        rows.append(row)
    return rows


class _Watched:
    """A product run in a thread of its own, with its steps and events as they come."""

    def __init__(self, storage: str, workers: str) -> None:
        self.job = job_from_dict(
            {
                "name": "bench-elastic",
                "task": "raytrain_app.bench.slow_task:TASK",
                "model": {"name": "linear"},
                "train": {"epochs": 1_000_000, "global_batch_size": 40, "virtual_shards": 2},
                "scaling": {"workers": workers},
                "failure": {"max_restarts": 1_000_000},
                "checkpoint": {"every_steps": 1_000_000},
                "storage": storage,
                "tensorboard": False,
            }
        )
        self.steps: list[tuple[float, int, int]] = []
        self.pids: dict[str, tuple[int, str]] = {}
        self.resumed: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, request: Request) -> None:
        """Posts a request to the run."""
        Requests(Folder.open(self.job.storage).child(self.job.name)).post(request)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Waits for something to be true and returns it."""
        deadline_s = time.monotonic() + WAIT_S
        while not (found := condition()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what} did not happen within {WAIT_S:g} s")
            time.sleep(0.02)
        return found

    def first_step(self, after_s: float, workers: int | None = None) -> tuple[float, int, int]:
        """The first step after a time, with that many workers if given."""
        found: tuple[float, int, int] = self.until(
            lambda: next((s for s in list(self.steps) if s[0] > after_s and workers in (None, s[2])), None), "the next step"
        )
        return found

    def pause(self, after_s: float, workers: int) -> float:
        """The gap between the first step with another number of workers and the one before it."""
        step = self.first_step(after_s, workers)
        before = max(s[0] for s in self.steps if s[0] < step[0])
        return step[0] - before

    def stop(self) -> None:
        """Ends the run."""
        self.ask(Request(kind="stop"))
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        with contextlib.suppress(Interrupted):  # as asked
            runner.run(self.job, on_update=self._watch)

    def _watch(self, update: Update) -> None:
        record = update.record
        if update.kind == "step":
            self.steps.append((record["time"], record["step"], record["workers"]))
        elif update.kind == "event" and record["kind"] == "join":
            self.pids[record["worker"]] = record["pid"], record["node"]
        elif update.kind == "event" and record["kind"] in ("worker_lost", "node_lost"):
            self.pids.pop(record["worker"], None)
        elif update.kind == "event" and record["kind"] == "resume":
            self.resumed.append(record["step"])


def measure_product(repeats: int, tell: Callable[[str], None]) -> Figures:
    """Measures all events `repeats` times (those that take a minute, fewer times)."""
    figures, rng = Figures(), random.Random(0)
    with tempfile.TemporaryDirectory() as storage, LocalNodes(2, {"CPU": 1}) as nodes:
        ray.init(address=nodes.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        run = _Watched(storage, "1..2")
        try:
            run.first_step(0.0, 2)
            for number in range(repeats):
                tell(f"kill {number + 1} of {repeats}")
                _kill(run, figures, rng)
            for number in range(repeats):
                tell(f"leave and return {number + 1} of {repeats}")
                _leave_and_return(run, figures)
            for number in range(repeats):
                tell(f"node {number + 1} of {repeats}")
                _lose_node(run, figures, nodes)
            for number in range(max(1, repeats // 3)):
                tell(f"all workers {number + 1} of {max(1, repeats // 3)}")
                _lose_all(run, figures)
        finally:
            run.stop()
            ray.shutdown()
    return figures


def _kill(run: _Watched, figures: Figures, rng: random.Random) -> None:
    time.sleep(rng.random())
    pid, _ = run.pids[rng.choice(sorted(run.pids))]
    at_s = time.time()
    os.kill(pid, signal.SIGKILL)
    figures.add("kill", run.first_step(at_s, 1)[0] - at_s)
    figures.add("join", run.pause(at_s, 2))


def _leave_and_return(run: _Watched, figures: Figures) -> None:
    for most, event in ((1, "leave"), (2, "return")):
        at_s = time.time()
        run.ask(Request(kind="scale", least=1, most=most))
        figures.add(event, run.pause(at_s, most))


def _lose_node(run: _Watched, figures: Figures, nodes: LocalNodes) -> None:
    _, node_id = run.pids[max(run.pids)]
    before = {node.node_id for node in living_nodes()}
    at_s = time.time()
    nodes.remove(node_id)
    # Its worker trains on until it notices that its raylet is gone; what counts is the first step without it.
    step = run.first_step(at_s, 1)
    gap = step[0] - max(s[0] for s in run.steps if s[0] < step[0])
    figures.add("node_lost", gap)
    nodes.add()
    run.until(lambda: {node.node_id for node in living_nodes()} - before, "the new node")
    arrived_s = time.time()
    figures.add("node_joins", run.first_step(arrived_s, 2)[0] - arrived_s)


def _lose_all(run: _Watched, figures: Figures) -> None:
    last, at_s = run.steps[-1][1], time.time()
    for pid, _ in list(run.pids.values()):
        os.kill(pid, signal.SIGKILL)
    resumed = len(run.resumed)
    run.until(lambda: len(run.resumed) > resumed, "going on from memory")
    figures.add("all_lost", run.first_step(at_s)[0] - at_s, redone=max(0, last - run.resumed[-1]))
    run.first_step(time.time(), 2)


def measure_stock(tell: Callable[[str], None]) -> Figures:
    """The same for stock elastic Ray Train: a worker killed, a node that joins, a node that is lost."""
    figures = Figures()
    for event in ("node_joins", "node_lost", "kill"):
        tell(f"stock Ray Train: {EVENTS[event]}")
        with LocalNodes(1 if event == "node_joins" else 2, {"CPU": 1}) as nodes:
            seconds, redone = StockRun(nodes).measure(event)
        figures.add(event, seconds, redone)
    return figures
