"""A run's numbers as Prometheus metrics, through Ray: they are at the metrics endpoint of the driver's node.

Ray puts `ray_` before each name. `grafana.json` beside this file is a dashboard of them.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from raytrain_app.report.updates import Update

GAUGES = {
    "step": ("raytrain_steps", "Steps applied since the run began."),
    "total_steps": ("raytrain_planned_steps", "Steps of the whole run."),
    "epoch": ("raytrain_epoch", "The epoch under way, from 1."),
    "samples": ("raytrain_samples", "Rows applied since the run began."),
    "tokens": ("raytrain_tokens", "Tokens of these rows, where they are sequences."),
    "workers": ("raytrain_workers", "Workers that train."),
    "loss": ("raytrain_loss", "Training loss of the last step, or of the epoch that just ended."),
    "accuracy": ("raytrain_accuracy_ratio", "Training accuracy of the last step, from 0 to 1."),
    "val_loss": ("raytrain_validation_loss", "Validation loss after the last epoch."),
    "val_accuracy": ("raytrain_validation_accuracy_ratio", "Validation accuracy after the last epoch, from 0 to 1."),
    "lr": ("raytrain_learning_rate", "Learning rate of the last step."),
    "time": ("raytrain_last_step_timestamp_seconds", "When the last step was applied, in seconds since 1970."),
}
"""Metric and help of each key of a line of metrics.jsonl."""


class RunMetrics:
    """Sets the metrics of one run from its updates. Not for several threads.

    Args:
        run: its name, the value of the label `run`.
    """

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._gauges = {key: Gauge(name, about, tag_keys=("run",)) for key, (name, about) in GAUGES.items()}
        self._disruptions = Counter(
            "raytrain_disruptions_total", "Changes of the workers while the run trained, by cause.", tag_keys=("run", "cause")
        )
        self._paused = Counter("raytrain_paused_seconds_total", "Seconds without a step, due to disruptions.", tag_keys=("run",))
        self._redone = Counter("raytrain_redone_steps_total", "Steps that had to be computed again.", tag_keys=("run",))
        self._checkpoints = Counter("raytrain_checkpoints_total", "Checkpoints written.", tag_keys=("run",))
        self._checkpoint_s = Gauge(
            "raytrain_checkpoint_write_seconds", "How long the last checkpoint took to write.", tag_keys=("run",)
        )

    def take(self, update: Update) -> None:
        """Takes one update."""
        record = update.record
        if update.kind in ("step", "epoch"):
            for key, gauge in self._gauges.items():
                value = record.get(key)
                if value is not None:
                    gauge.set(value, self._tags)
        elif update.kind == "event" and record["kind"] == "disruption":
            receipt = record["receipt"]
            self._disruptions.inc(1, {**self._tags, "cause": receipt["cause"]})
            if receipt["paused_s"] > 0:
                self._paused.inc(receipt["paused_s"], self._tags)
            if receipt["steps_redone"] > 0:
                self._redone.inc(receipt["steps_redone"], self._tags)
        elif update.kind == "event" and record["kind"] == "checkpoint":
            self._checkpoints.inc(1, self._tags)
            self._checkpoint_s.set(record["seconds"], self._tags)
