"""A driver that test_hard_times.py runs: on nodes that flap, fall silent, go, or are replaced. What it saw is in seen.json."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from raytrain_app.cluster.local import LocalNodes
from raytrain_app.cluster.nodes import living_nodes
from raytrain_app.drill import local_nodes
from raytrain_app.errors import ClusterError
from tests.integration.elastic.disturbed import Disturbed, assert_undisturbed, slow_job
from tests.integration.elastic.far_machine import FarMachine, far_machine

CUT_OFF_S = 12.0
TRAIN = {"epochs": 100, "global_batch_size": 50, "virtual_shards": 4}


def flapping(run: Disturbed, nodes: LocalNodes) -> None:
    """A node that comes, stays a few seconds, and is lost, again and again."""
    known = {node.node_id for node in living_nodes()}
    for _ in range(6):
        nodes.add()
        while not (new := {node.node_id for node in living_nodes()} - known):
            time.sleep(0.1)
        known |= new
        time.sleep(3)
        nodes.remove(new.pop())


def replaced(run: Disturbed, nodes: LocalNodes) -> None:
    """Each node is lost in turn, and another one comes for it."""
    for worker in run.seen("join"):
        joined = len(run.seen("join"))
        nodes.remove(worker["node"])
        nodes.add()
        deadline_s = time.monotonic() + 60
        while len(run.seen("join")) == joined and time.monotonic() < deadline_s:
            time.sleep(0.1)


def silent(run: Disturbed, nodes: LocalNodes) -> None:
    """A machine that answers no more, while its connections stay open."""
    worker = run.seen("join")[-1]
    raylet = psutil.Process(worker["pid"]).parent()
    assert raylet is not None
    for process in (raylet, *raylet.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(process.pid, signal.SIGSTOP)


def gone(run: Disturbed, nodes: LocalNodes) -> None:
    """The only node for workers is lost, and none comes in its place."""
    nodes.remove(run.seen("join")[0]["node"])


def cut_off(run: Disturbed, machine: FarMachine) -> None:
    """A network that drops all packets of a machine for a while, in which the worker there lives on."""
    machine.cut_off()
    time.sleep(CUT_OFF_S)
    machine.reconnect()


SCENARIOS: dict[str, tuple[Callable[[Disturbed, Any], None], int]] = {
    "flapping": (flapping, 1),
    "replaced": (replaced, 2),
    "silent": (silent, 2),
    "cut-off": (cut_off, 1),
    "gone": (gone, 1),
}


def main(name: str, storage: Path) -> None:
    scenario, count = SCENARIOS[name]
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(local_nodes(slow_job(storage, name, workers=count), count))
        patience = {"heartbeat_s": 30 if name == "cut-off" else 3}
        job = slow_job(storage, name, train=TRAIN, scaling={"workers": "1..2", "wait_s": 5}, failure=patience)
        machine = stack.enter_context(far_machine(nodes)) if name == "cut-off" else None
        run = Disturbed(job, {40: lambda run: scenario(run, machine or nodes)})
        if name == "gone":
            try:
                run.run()
            except ClusterError as error:
                (storage / "seen.json").write_text(json.dumps({"error": str(error)}))
            return
        record = run.run()
        calm = Disturbed(slow_job(storage, "calm", task="tests.integration.elastic.slow_task:QUICK", train=TRAIN, workers=1))
        assert_undisturbed(run, record, calm.run())
    kinds = ("join", "worker_lost", "node_lost", "pool_start", "disruption")
    seen = {kind: run.seen(kind) for kind in kinds}
    (storage / "seen.json").write_text(json.dumps({**seen, "far": machine.node_id if machine else None}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
