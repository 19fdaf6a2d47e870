"""Stock elastic Ray Train as its documentation has it: a `TorchTrainer` with a range of workers and a checkpoint now and then."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from raytrain_app.cluster.local import LocalNodes
from raytrain_app.cluster.nodes import living_nodes
from raytrain_app.session import NAMESPACE

STEP_S = 0.02
CHECKPOINT_STEPS = 50
WAIT_S = 240.0
Row = tuple[float, int, int, int]
"""Time, step, workers, process id of rank 0."""


class StockRun:
    """One run on the given nodes, in a process of its own."""

    def __init__(self, nodes: LocalNodes) -> None:
        self._nodes = nodes
        self._folder = Path(tempfile.mkdtemp(prefix="raytrain-stock-"))
        self._log = self._folder / "steps"
        self._log.touch()

    def measure(self, event: str) -> tuple[float, int]:
        """Makes an event happen; returns the seconds from it to the first step after it, and the steps redone."""
        command = [sys.executable, "-m", __name__, self._nodes.address, str(self._folder)]
        with (self._folder / "output").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        ray.init(address=self._nodes.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        try:
            workers = 1 if event == "node_joins" else 2
            self._until(lambda: sum(row[2] == workers for row in self._rows()) > 2 * CHECKPOINT_STEPS)
            measured = self._disturb(event)
        finally:
            ray.shutdown()
            process.terminate()
            process.wait()
        shutil.rmtree(self._folder)  # where it failed, its output stays
        return measured

    def _disturb(self, event: str) -> tuple[float, int]:
        last = self._rows()[-1]
        at_s = time.time()
        if event == "kill":
            os.kill(last[3], signal.SIGKILL)
        elif event == "node_lost":
            here = ray.get_runtime_context().get_node_id()
            self._nodes.remove(next(node.node_id for node in living_nodes() if node.node_id != here))
        else:
            threading.Thread(target=self._nodes.add).start()
            self._until(lambda: len(living_nodes()) == 3)
            at_s = time.time()
        before = [row for row in self._rows() if row[0] <= at_s]
        wanted = {"kill": 2, "node_lost": 1, "node_joins": 2}[event]
        # After a death the next step is one of a new process; it may repeat what was done since the last checkpoint.
        found = self._until(lambda: next((r for r in self._rows() if r[0] > at_s and r[2] == wanted and r[3] != last[3]), None))
        furthest = max(row[1] for row in self._rows() if row[0] < found[0])
        assert before
        return found[0] - at_s, max(0, furthest + 1 - found[1])

    def _rows(self) -> list[Row]:
        rows = [line.split() for line in self._log.read_text().splitlines()]
        return [(float(t), int(s), int(w), int(p)) for t, s, w, p in (row for row in rows if len(row) == 4)]

    def _until(self, condition: Callable[[], Any]) -> Any:
        deadline_s = time.monotonic() + WAIT_S
        while not (found := condition()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"stock Ray Train took over {WAIT_S:g} s; its output is in {self._folder}")
            time.sleep(0.1)
        return found


def train_loop(config: dict[str, Any]) -> None:
    """A step of `STEP_S`, a checkpoint every `CHECKPOINT_STEPS`, and a line for each step of rank 0."""
    import ray.train.torch
    import torch

    torch.set_num_threads(1)
    model = ray.train.torch.prepare_model(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    context, first = ray.train.get_context(), 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            first = json.loads(Path(folder, "step.json").read_text()) + 1
    for step in range(first, 10**9):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(20, 16)), torch.randint(0, 4, (20,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_S)
        leads = context.get_world_rank() == 0
        if leads:
            with open(config["log"], "a", encoding="utf-8") as log:
                log.write(f"{time.time()} {step} {context.get_world_size()} {os.getpid()}\n")
        if step % CHECKPOINT_STEPS == CHECKPOINT_STEPS - 1:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "step.json").write_text(json.dumps(step))
                ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder) if leads else None)


def main(address: str, folder: str) -> None:
    """Trains until it is ended."""
    from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.torch.torch_trainer import TorchTrainer

    ray.init(address=address, log_to_driver=False)
    TorchTrainer(
        train_loop,
        train_loop_config={"log": f"{folder}/steps"},
        scaling_config=ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=2.0),
        run_config=RunConfig(storage_path=f"{folder}/storage", failure_config=FailureConfig(max_failures=-1)),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
