"""Real faults for a running job: killed and stopped processes, drained and lost nodes, changes of size, at given steps."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_app.actors import wait_for
from raytrain_app.cluster.nodes import drain_node, living_nodes
from raytrain_app.report.updates import Update
from raytrain_app.storage.requests import Request, Requests
from raytrain_app.storage.rundir import RunDirectory

KINDS = ("kill", "stop", "drain", "node", "resize", "server")
DRAIN_S = 8.0
"""Notice that a drained node gets before it is gone."""
NODE_GAP_S = 2.0
"""Time until a node comes in place of a lost one."""
VICTIM_S, LOOK_S = 60.0, 0.2
"""How long a fault waits for somebody whom it can strike, and how often it looks."""


@dataclass(frozen=True)
class Fault:
    """A fault of one of `KINDS`, to happen when a step has been applied."""

    kind: str
    step: int


class Nodes(Protocol):
    """Machines that can be taken away and brought; see `cluster.local.LocalNodes`."""

    def remove(self, node_id: str) -> None:
        """Ends a node as a power cut would."""
        ...

    def add(self) -> str:
        """Brings a node like those removed; returns its name."""
        ...


def plan_faults(seed: int, counts: Mapping[str, int], total_steps: int) -> list[Fault]:
    """A random schedule: every fault at a step of its own choice, in the order of the steps.

    Args:
        seed: the same seed gives the same schedule.
        counts: faults wanted by kind.
        total_steps: of the run; faults spare its first and last tenth.
    """
    rng = random.Random(seed)
    first, last = max(1, total_steps // 10), max(1, total_steps - total_steps // 10)
    faults = [Fault(kind, rng.randint(first, last)) for kind in KINDS for _ in range(counts.get(kind, 0))]
    return sorted(faults, key=lambda fault: fault.step)


class Injector:
    """Watches a run's updates and commits the faults when their steps come. Give `watch` to `runner.run`.

    Args:
        faults: what to do and when.
        seed: chooses victims and sizes.
        directory: URI of the run directory, whose status tells who trains.
        most: largest size for "resize".
        nodes: needed for "drain" and "node".
        unit: workers that come and go together, since they hold a replica together.
    """

    def __init__(self, faults: list[Fault], seed: int, directory: str, most: int, nodes: Nodes | None, unit: int = 1) -> None:
        self._due = list(faults)
        self._rng = random.Random(seed + 1)
        self._directory, self._most, self._nodes, self._unit = directory, most, nodes, unit
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._killed: set[int] = set()
        self._step = 0
        self.committed: list[dict[str, Any]] = []

    def watch(self, update: Update) -> None:
        """Commits all faults that are due, each in a thread of its own."""
        if update.kind != "step":
            return
        self._step = update.record["step"]
        while self._due and update.record["step"] >= self._due[0].step:
            fault = self._due.pop(0)
            thread = threading.Thread(target=self._commit, args=(fault,), daemon=True, name=f"fault-{fault.kind}")
            thread.start()
            self._threads.append(thread)

    def join(self) -> None:
        """Waits until all faults under way are done; those that found nobody to strike are given up, since the run is over."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _commit(self, fault: Fault) -> None:
        entry: dict[str, Any] = {"kind": fault.kind, "step": fault.step, "time": time.time()}
        self.committed.append(entry)
        if fault.kind == "resize":
            entry["workers"] = self._unit * self._rng.randint(1, self._most // self._unit)
            request = Request(kind="scale", least=self._unit, most=entry["workers"])
            Requests(RunDirectory.open(self._directory).folder).post(request)
            return
        deadline_s = time.monotonic() + VICTIM_S
        while not self._strike(fault.kind, entry):
            # Whoever comes next takes a step first: workers that die again and again before they do are the task's fault.
            seen = self._step
            while self._step == seen:
                if time.monotonic() > deadline_s or self._over.wait(LOOK_S):
                    entry["skipped"] = "nobody was there"
                    return

    def _strike(self, kind: str, entry: dict[str, Any]) -> bool:
        """Whether there was a victim; the status that tells of them is up to a second old."""
        status = RunDirectory.open(self._directory).read_status() or {"workers": [], "servers": []}
        workers = [w for w in status["workers"] if w["state"] in ("active", "waiting")]
        candidates = status["servers"] if kind == "server" else workers
        victims = [candidate for candidate in candidates if candidate["pid"] not in self._killed]
        if not victims:
            return False
        victim = self._rng.choice(victims)
        if kind in ("drain", "node"):
            self._lose_node(kind, victim["node"], entry)
            return True
        entry |= {name: victim[name] for name in ("worker", "server") if name in victim}
        if kind == "stop":
            return _on_node(victim["node"], victim["pid"], signal.SIGSTOP)
        self._killed.add(victim["pid"])
        return _on_node(victim["node"], victim["pid"], signal.SIGKILL)

    def _lose_node(self, kind: str, node_id: str, entry: dict[str, Any]) -> None:
        assert self._nodes is not None, "drain and node need nodes that can be lost"
        entry["node"] = node_id
        if kind == "drain":
            drain_node(node_id, "drill", DRAIN_S)
            time.sleep(DRAIN_S)
        if node_id in {node.node_id for node in living_nodes()}:
            self._nodes.remove(node_id)
        time.sleep(NODE_GAP_S)
        self._nodes.add()


def _on_node(node_id: str, pid: int, number: int) -> bool:
    """Signals a process on a node of the cluster, from that node; False when one of them is gone."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task: Any = ray.remote(_signal).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
    try:
        return bool(wait_for(task.remote(pid, number)))
    except RayError:
        return False


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it died of something else meanwhile
        return False
    return True
