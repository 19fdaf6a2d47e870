"""The framework's own callbacks in a run with parameter servers: the evaluator runs them, epoch by epoch.

Steps have no order there that any one process sees, so callbacks of batches are refused. One at an epoch's end sees the
parameters right after the epoch's last gradient; workers are further by then, so it may stop training, but not change it.
"""

from __future__ import annotations

from typing import Any

from raytrain_app.elastic.progress import Metrics
from raytrain_app.errors import JobError, TrainingError
from raytrain_app.learners.base import Learner
from raytrain_app.state import weights_sha256


class EpochCallbacks:
    """The callbacks of a learner that holds each epoch's parameters when its time has come; a learner may have none.

    Args:
        learner: whose callbacks they are.
        steps: of an epoch.
    """

    def __init__(self, learner: Learner, steps: int) -> None:
        self._learner, self._callbacks, self._steps = learner, learner.callbacks, steps

    def refuse_batches(self) -> None:
        """Raises JobError if some callback wants to be called for batches."""
        hooks = sorted(hook for hook in self._callbacks.hooks if "batch" in hook)
        if hooks:
            raise JobError(
                f"the task's callbacks have {' and '.join(hooks)}, which strategy parameter_server cannot call: no process sees "
                "all batches in order; use callbacks of epochs, or strategy: {name: allreduce}"
            )

    def run(self, hook: str, logs: Metrics) -> None:
        """Runs a hook that has no number."""
        if hook in self._callbacks.hooks:
            self._callbacks.wake(self._steps)
            self._callbacks.run(hook, dict(logs))

    def epoch_ends(self, epoch: int, metrics: Metrics) -> bool:
        """Runs what belongs to an epoch (from 1) that has ended; returns whether training should stop.

        Raises:
            TrainingError: a callback changed the weights or the learning rate.
        """
        if not self._callbacks.hooks:
            return False
        before = weights_sha256(self._learner.weights())
        self._callbacks.wake(self._steps)
        self._callbacks.run("on_epoch_begin", epoch - 1, {})
        self._callbacks.run("on_epoch_end", epoch - 1, dict(metrics))
        changed: list[Any] = [
            what
            for what, is_changed in (
                ("the weights", weights_sha256(self._learner.weights()) != before),
                ("the learning rate", self._callbacks.lr is not None),
            )
            if is_changed
        ]
        if changed:
            raise TrainingError(
                f"a callback changed {' and '.join(changed)} at the end of epoch {epoch}, but workers are further by then under "
                "strategy parameter_server; use optimizer.schedule, or strategy: {name: allreduce}"
            )
        return self._callbacks.stop
