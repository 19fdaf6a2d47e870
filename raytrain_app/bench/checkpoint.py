"""How long a checkpoint holds training: the product and stock Ray Train with the same model, one after the other in one run."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from raytrain_app.bench.watched import WatchedRun, own_ray
from raytrain_app.job import job_from_dict

MODEL, OPTIONS = "mlp", {"hidden": 1_500}
"""1.2 million parameters; with Adam a checkpoint has three times as many numbers."""
EVERY, BATCH, WAIT_S = 50, 64, 300.0


@dataclass
class Figures:
    """Medians over the checkpoints, in seconds.

    Attributes:
        held_s: copying the state, and waiting for the checkpoint before if that is still being written.
        written_s: writing it, beside training.
        step_s, stock_step_s: a step without a checkpoint.
        longer_s, stock_longer_s: by how much a step with a checkpoint takes longer.
    """

    held_s: float
    written_s: float
    step_s: float
    longer_s: float
    stock_step_s: float | None = None
    stock_longer_s: float | None = None

    def lines(self) -> list[str]:
        """For people."""
        held, longer, usual = (f"{seconds * 1e3:.1f} ms" for seconds in (self.held_s, self.longer_s, self.step_s))
        lines = [
            f"a checkpoint holds training for {held}, and is written in {self.written_s:.2f} s meanwhile",
            f"raytrain         a step takes {usual}, with a checkpoint {longer} more",
        ]
        if self.stock_step_s is not None and self.stock_longer_s is not None:
            longer, usual = (f"{seconds * 1e3:.1f} ms" for seconds in (self.stock_longer_s, self.stock_step_s))
            share = self.longer_s / self.stock_longer_s
            lines.append(f"stock Ray Train  a step takes {usual}, with a checkpoint {longer} more; share {share:.3f}")
        return lines


def measure_checkpoint(checkpoints: int, workers: int, stock: bool, tell: Callable[[str], None]) -> Figures:
    """Trains until so many checkpoints are written. Ray must not be up.

    Args:
        checkpoints: how many.
        workers: of the job.
        stock: measure stock Ray Train too.
        tell: told of progress.
    """
    with tempfile.TemporaryDirectory() as folder:
        tell("raytrain")
        figures = _product(folder, checkpoints, workers)
    if stock:
        with tempfile.TemporaryDirectory() as folder:
            tell("stock Ray Train")
            figures.stock_step_s, figures.stock_longer_s = _stock(folder, checkpoints, workers)
    return figures


def _product(storage: str, checkpoints: int, workers: int) -> Figures:
    steps = EVERY * (checkpoints + 1)
    job = {
        "name": "bench-checkpoint",
        "task": "raytrain_app.bench.random_images:TASK",
        "model": {"name": MODEL, **OPTIONS},
        "data": {"source": str(2 * steps * BATCH), "validation_fraction": 0.0},
        "train": {"global_batch_size": BATCH},
        "scaling": {"workers": workers},
        "checkpoint": {"every_steps": EVERY, "monitor": "loss"},
        "storage": storage,
    }
    with own_ray(2 * workers):
        run = WatchedRun(job_from_dict(job))
        run.until(lambda: run.steps and run.steps[-1].step >= steps, f"step {steps}")
        run.stop()
    written = [event for event in run.events if event["kind"] == "checkpoint" and event["step"] <= steps]
    times = {step.step: step.time_s for step in run.steps}
    step_s, longer_s = _longer([times[step] for step in range(1, steps + 1)], {event["step"] - 1 for event in written})
    return Figures(
        held_s=statistics.median(event["held_s"] for event in written),
        written_s=statistics.median(event["seconds"] for event in written),
        step_s=step_s,
        longer_s=longer_s,
    )


def _stock(folder: str, checkpoints: int, workers: int) -> tuple[float, float]:
    steps = EVERY * (checkpoints + 1)
    config = {"model": MODEL, "options": OPTIONS, "rows": BATCH // workers, "steps": steps, "every": EVERY}
    command = [sys.executable, "-m", "raytrain_app.bench.stock_checkpoint", json.dumps(config), str(workers), folder]
    subprocess.run(command, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    began = json.loads(Path(folder, "began").read_text())
    return _longer(began, set(range(EVERY - 1, steps - 1, EVERY)))


def _longer(times: Sequence[float], saved: set[int]) -> tuple[float, float]:
    """The median gap between `times`, and by how much the median of the gaps after those numbered `saved` is longer."""
    gaps = [after - before for before, after in pairwise(times)]
    usual = statistics.median(gap for number, gap in enumerate(gaps) if number not in saved)
    return usual, statistics.median(gaps[number] for number in saved if number < len(gaps)) - usual
