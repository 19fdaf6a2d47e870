"""What a step costs: the product's exact and fast step, and the plain script that people train with today, in one go.

All train the same model on the same rows in memory, with the same global batch and threads. Each is a set of processes of
its own that stays up, and one after the other they take some steps while the rest stand still; so what else happens on the
machine meets all alike. The product is measured whole: a real run, with membership, metrics, flags, and its driver beside it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil

from raytrain_app.bench.watched import WatchedRun, own_ray
from raytrain_app.errors import TrainingError
from raytrain_app.job import Job, job_from_dict

WARM_UP = 20
SETTLE_S = 0.5
"""After standing still, what was due meanwhile is done at once, such as snapshots; so long a run's steps do not count."""
EPOCH_STEPS = 1000
NICENESS = 15
"""Of Ray's workers, so that whatever else runs on the machine takes as much from the scripts."""
LR = 0.002
PLAIN = {"torch": "raytrain_app.bench.plain_torch", "tensorflow": "raytrain_app.bench.plain_keras"}
"""The plain script of each framework."""
LIMITS = {("torch", "cnn", 1): 1.15, ("torch", "cnn", 2): 1.15, ("torch", "mlp", 2): 1.3}
FAST_LIMIT = 1.03
"""What the exact step, by framework, model and workers, and the fast step may take, as parts of the plain script's."""
CONTROL_LIMIT = 0.02
"""What control may add to the CNN's step."""
SIZES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("linear", {}),
    ("mlp", {}),
    ("mlp", {"hidden": 1_500}),
    ("mlp", {"hidden": 31_000}),
)
"""Models from 8 thousand to 25 million parameters."""


@dataclass(frozen=True)
class Setting:
    """What all train.

    Attributes:
        framework: of `PLAIN`.
        model, options: of the task.
        batch: rows of the global batch.
        workers: processes of each kind.
        shards: virtual shards of the global batch.
        threads: intra-op threads of a process.
        device: "cpu" or "cuda".
        steps: that are taken at a time.
        rounds: how often each kind takes them.
        cuda_graphs: of the exact step.
    """

    framework: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 64
    workers: int = 2
    shards: int = 2
    threads: int = 1
    device: str = "cpu"
    steps: int = 50
    rounds: int = 7
    cuda_graphs: bool = False

    def job(self, storage: str, reduction: str = "exact", **more: Any) -> Job:
        """The job of a product run, which does not end by itself."""
        # All runs are up at the same time: single workers share a GPU, and groups, which cannot, need two each and more.
        gpus = {"GPU": 0.25 if self.workers == 1 else 1} if self.device == "cuda" else {}
        return job_from_dict(
            {
                "name": "-".join(["bench-step", reduction, *more]),
                "task": "raytrain_app.bench.random_images:TASK",
                "framework": self.framework,
                "model": {"name": self.model, **self.options},
                "data": {"source": str(self.rows), "validation_fraction": 0.0},
                "train": {
                    "epochs": 1_000_000,
                    "global_batch_size": self.batch,
                    "virtual_shards": self.shards,
                    "threads": self.threads,
                    "reduction": reduction,
                    "cuda_graphs": self.cuda_graphs and reduction == "exact",
                },
                "optimizer": {"name": "adam", "lr": LR},
                "scaling": {"workers": self.workers, "resources_per_worker": {"CPU": 1, **gpus}},
                "checkpoint": {"every_steps": 1_000_000, "monitor": "loss"},
                # Workers that stand still are not to be taken for dead.
                "failure": {"heartbeat_s": 3600.0},
                "storage": storage,
                **more,
            }
        )

    @property
    def rows(self) -> int:
        """Of an epoch; the run has no last one."""
        return self.batch * EPOCH_STEPS

    def script(self) -> dict[str, Any]:
        """What a script is told."""
        return {
            "model": self.model,
            "options": self.options,
            "rows": self.rows,
            "batch": self.batch,
            "threads": self.threads,
            "lr": LR,
            "device": self.device,
        }


class Contestant(Protocol):
    """Processes that train, and stand still when they are not asked to."""

    def take(self, steps: int) -> dict[str, float]:
        """Takes that many steps; returns the seconds a step as `step`, and what else it has measured."""
        ...

    def close(self) -> None:
        """Ends the processes."""
        ...


class Script:
    """A script that reads numbers of steps and answers with seconds; with several workers `torchrun` starts it."""

    def __init__(self, module: str, workers: int, config: dict[str, Any]) -> None:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", "-m"] if workers > 1 else []
        self._module, self._errors = module, tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the processes
        self._process = subprocess.Popen(
            ["nice", "-n", str(NICENESS), sys.executable, "-m", *launcher, module, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def take(self, steps: int) -> dict[str, float]:
        """See `Contestant`.

        Raises:
            TrainingError: the script has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise TrainingError(f"{self._module} ended instead of taking steps:\n{self._errors.read()[-2000:]}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """See `Contestant`."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._process.communicate("")
        self._errors.close()


class ProductRun:
    """A run of the product that stands still between the rounds: its workers, and the actors beside them."""

    def __init__(self, job: Job) -> None:
        others = _actors()
        self._run = WatchedRun(job)
        self._run.until(lambda: self._run.steps, "the first step")
        self._processes = _actors() - others
        self._signal(signal.SIGSTOP)

    def take(self, steps: int) -> dict[str, float]:
        """See `Contestant`."""
        known = len(self._run.steps)
        self._signal(signal.SIGCONT)
        settled_s = time.time() + SETTLE_S

        def taken() -> list[float]:
            return [step.time_s for step in self._run.steps[known:] if step.time_s > settled_s]

        times: list[float] = self._run.until(lambda: t if len(t := taken()) > steps else None, f"{steps} steps")
        self._signal(signal.SIGSTOP)
        return {"step": (times[steps] - times[0]) / steps}

    def close(self) -> None:
        """See `Contestant`."""
        self._signal(signal.SIGCONT)
        self._run.stop()

    def _signal(self, number: signal.Signals) -> None:
        """SIGSTOP makes all stand still, the driver too, which waits for them; SIGCONT go on, as if no time had passed."""
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _actors() -> set[psutil.Process]:
    """The processes of this process's Ray that have something to do."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = "".join(process.cmdline()[:1])
            if title.startswith("ray::") and not title.startswith("ray::IDLE"):
                found.add(process)
    return found


@dataclass
class Figures:
    """Medians over the rounds.

    Attributes:
        setting: what was trained.
        seconds: a step, by kind.
        ratios: of each kind to the plain script of the same round.
        parts: seconds of the exact step's parts.
        control: what membership, metrics, flags, audit and the driver beside them add to the step without Ray around it, as a
            part of that.
    """

    setting: Setting
    seconds: dict[str, float]
    ratios: dict[str, float]
    parts: dict[str, float]
    control: float

    def lines(self) -> list[str]:
        """For people."""
        setting = self.setting
        options = "".join(f", {name} {value}" for name, value in setting.options.items())
        counts = [(setting.workers, "worker"), (setting.shards, "shard"), (setting.threads, "thread")]
        texts = [f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in counts]
        lines = [f"{setting.model}{options}, global batch {setting.batch}, {', '.join(texts)}, {setting.device}"]
        for kind, seconds in self.seconds.items():
            lines.append(f"  {kind:<14}{seconds * 1e3:9.3f} ms a step   {self.ratios[kind]:.3f} of plain")
        parts = ", ".join(f"{name} {seconds * 1e3:.3f}" for name, seconds in self.parts.items())
        lines.append(f"  engine, in ms: {parts}")
        engine_ms = self.seconds["engine"] * 1e3
        lines.append(f"  control: {engine_ms:.3f} ms without, {self.control:+.1%} with all that a run has around the engine")
        return [*lines, *self._targets()]

    def _targets(self) -> list[str]:
        """What the step is to reach, and whether it did; other settings have no targets."""
        exact = LIMITS.get((self.setting.framework, self.setting.model, self.setting.workers))
        if exact is None or self.setting.options:
            return []
        limits = {"exact": exact, "fast": FAST_LIMIT}
        targets = [(f"{kind} at most {limit:g} of plain", self.ratios[kind] <= limit) for kind, limit in limits.items()]
        if self.setting.model == "cnn":
            targets.append((f"control at most {CONTROL_LIMIT:.0%} of the step", self.control <= CONTROL_LIMIT))
        return [f"  {'reached' if reached else 'MISSED '} {target}" for target, reached in targets]


def measure(setting: Setting, tell: Callable[[str], None]) -> Figures:
    """Measures all kinds, interleaved. Ray must not be up.

    Args:
        setting: what to train.
        tell: told of progress.
    """
    tell(f"starting: {setting.model} {setting.options or ''}")
    with tempfile.TemporaryDirectory() as storage, ExitStack() as stack:
        stack.enter_context(own_ray(8 * setting.workers))
        engine = {"job": setting.job(storage).model_dump(mode="json"), "device": setting.device}
        starts: dict[str, Callable[[], Contestant]] = {
            "plain": lambda: Script(PLAIN[setting.framework], setting.workers, setting.script()),
            "engine": lambda: Script("raytrain_app.bench.engine", setting.workers, engine),
            "exact": lambda: ProductRun(setting.job(storage)),
            "exact, audit": lambda: ProductRun(setting.job(storage, audit=True)),
        }
        if setting.framework == "torch":  # tf.distribute ends when its workers stand still, and is the plain script's step
            starts["fast"] = lambda: ProductRun(setting.job(storage, "fast"))
        contestants: dict[str, Contestant] = {}
        for kind, start in starts.items():
            contestants[kind] = start()
            stack.callback(contestants[kind].close)
            contestants[kind].take(WARM_UP)
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(setting.rounds):
            tell(f"round {number + 1} of {setting.rounds}")
            rounds.append({kind: contestant.take(setting.steps) for kind, contestant in contestants.items()})
    return _figures(setting, rounds)


def _figures(setting: Setting, rounds: Sequence[dict[str, dict[str, float]]]) -> Figures:
    def median(value: Callable[[dict[str, dict[str, float]]], float]) -> float:
        return statistics.median(map(value, rounds))

    kinds = rounds[0].keys()
    seconds = {kind: median(lambda one, kind=kind: one[kind]["step"]) for kind in kinds}  # type: ignore[misc]
    ratios = {kind: median(lambda one, kind=kind: one[kind]["step"] / one["plain"]["step"]) for kind in kinds}  # type: ignore[misc]
    names = [name for name in rounds[0]["engine"] if name != "step"]
    parts = {name: median(lambda one, name=name: one["engine"][name]) for name in names}  # type: ignore[misc]
    controlled = median(lambda one: one["exact, audit"]["step"] / one["engine"]["step"])
    return Figures(setting, seconds, ratios, parts, controlled - 1)
