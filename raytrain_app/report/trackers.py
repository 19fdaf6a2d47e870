"""Experiment trackers, through their own libraries and their own settings: MLflow and Weights & Biases.

A tracker must not hold up training, nor end it: it works in a thread, gets at most one step a second, and when it fails the
run says so once and goes on without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from raytrain_app.job import Job
from raytrain_app.report.updates import Update

PACKAGES = {"mlflow": "mlflow", "wandb": "wandb"}
"""The package that each tracker needs; the extra of the same name brings it."""
EVERY_S = 1.0
"""Shortest time between two steps that a tracker gets."""
CLOSE_S = 15.0
"""How long the end of a run waits for a tracker."""
PLACE = ("kind", "epoch", "step", "time", "total_steps")

Record = Mapping[str, Any]


class Tracker(Protocol):
    """A tracker of one run; all calls come from one thread."""

    def start(self, job: Job, directory: str) -> None:
        """Begins a run in the tracker, or takes up the one of the same directory."""
        ...

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Numbers at a step."""
        ...

    def finish(self, result: Record | None) -> None:
        """The run ended with the content of result.json; None: nobody knows how."""
        ...


class Tracking:
    """A context that feeds one tracker in a thread.

    Args:
        name: "mlflow" or "wandb".
        job: what is trained.
        directory: URI of the run directory.
        tell: told, in the caller's thread, when the tracker fails.
    """

    def __init__(self, name: str, job: Job, directory: str, tell: Callable[[Update], None]) -> None:
        self._name, self._job, self._directory, self._tell = name, job, directory, tell
        self._queue: queue.SimpleQueue[Update | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._told = False
        self._last_s = 0.0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Tracking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._error = self._error or TimeoutError(f"it did not finish within {CLOSE_S:g} s")
        self._complain()

    def take(self, update: Update) -> None:
        """Takes an update; returns at once."""
        self._complain()
        if update.kind == "step":
            now_s = time.monotonic()
            if now_s - self._last_s < EVERY_S:
                return
            self._last_s = now_s
        if update.kind in ("step", "epoch", "result") and self._error is None:
            self._queue.put(update)

    def _complain(self) -> None:
        if self._error is not None and not self._told:
            self._told = True
            said = " ".join(str(self._error).split())[:200]
            self._tell(Update("note", f"{self._name}: {said}; the run goes on without it"))

    def _work(self) -> None:
        try:
            tracker = _make(self._name)
            tracker.start(self._job, self._directory)
            result: Record | None = None
            while (update := self._queue.get()) is not None:
                if update.kind == "result":
                    result = update.record
                    continue
                numbers = {
                    key: value for key, value in update.record.items() if key not in PLACE and isinstance(value, int | float)
                }
                prefix = "epoch/" if update.kind == "epoch" else "step/"
                metrics = {prefix + key: float(value) for key, value in numbers.items()}
                tracker.log(update.record["step"], update.record["time"], metrics)
            tracker.finish(result)
        except Exception as error:  # a tracker's library may raise anything, and training must not end for it
            self._error = error


def _make(name: str) -> Tracker:
    return Mlflow() if name == "mlflow" else Wandb()


class Mlflow:
    """MLflow. The server and the experiment are those of MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

    def start(self, job: Job, directory: str) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "raytrain")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        quoted = directory.replace("'", "''")
        earlier = self._client.search_runs([experiment_id], f"tags.`raytrain.directory` = '{quoted}'", max_results=1)
        if earlier:
            self._run_id = earlier[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        run = self._client.create_run(experiment_id, run_name=job.name, tags={"raytrain.directory": directory})
        self._run_id = run.info.run_id
        for key, value in flat(job.model_dump(mode="json")).items():
            self._client.log_param(self._run_id, key, value if isinstance(value, str) else json.dumps(value))

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(self._run_id, [Metric(key, value, int(time_s * 1000), step) for key, value in metrics.items()])

    def finish(self, result: Record | None) -> None:
        status = "KILLED" if result is None else result["status"]
        if result is not None:
            self.log(result.get("steps") or 0, time.time(), totals(result))
            self._client.set_tag(self._run_id, "raytrain.weights_sha256", str(result.get("weights_sha256")))
            self._client.set_tag(self._run_id, "raytrain.status", status)
        done = {"finished": "FINISHED", "early_stopped": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self._run_id, done.get(status, "KILLED"))


class Wandb:
    """Weights & Biases. Key, project and mode are those of WANDB_API_KEY, WANDB_PROJECT and WANDB_MODE."""

    def start(self, job: Job, directory: str) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "raytrain"),
            name=job.name,
            # The same for a run that is resumed.
            id=hashlib.sha256(directory.encode()).hexdigest()[:16],
            resume="allow",
            config=job.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, result: Record | None) -> None:
        if result is not None:
            self._run.summary.update(
                {**totals(result), "status": result["status"], "weights_sha256": result.get("weights_sha256")}
            )
        self._run.finish(exit_code=0 if result is not None and result["status"] in ("finished", "early_stopped") else 1)


def totals(result: Record) -> dict[str, float]:
    """The numbers of result.json."""
    return {key: float(value) for key, value in result.items() if isinstance(value, int | float) and not isinstance(value, bool)}


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones."""
    keys: dict[str, Any] = {}
    for name, value in section.items():
        keys.update(flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {prefix + name: value})
    return keys
