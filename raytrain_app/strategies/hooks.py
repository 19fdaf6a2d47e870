"""The framework's own callbacks in a generation of workers: the leader runs them, and all take over what they changed."""

from __future__ import annotations

import math
from typing import Any

import torch

from raytrain_app.elastic.exchange import broadcast, broadcast_bytes
from raytrain_app.elastic.group import Group
from raytrain_app.elastic.progress import Metrics, Progress
from raytrain_app.learners.base import Part
from raytrain_app.state import TrainState, weights_sha256


class Hooks:
    """Called by all members of a generation at the same points; without callbacks nothing happens and nothing is sent.

    A hook at the begin or end of an epoch, or at the end of training, may change weights, the learning rate and whether
    training goes on; one of a batch the latter two. If the leader dies before all know what its hook did, the hook is run again
    by the next leader.

    Args:
        learner: whose callbacks they are.
        steps: of an epoch.
    """

    def __init__(self, learner: Part, steps: int) -> None:
        self._learner, self._callbacks, self._steps = learner, learner.callbacks, steps

    @property
    def lr(self) -> float | None:
        """The learning rate that callbacks have set; None is the job's."""
        return self._callbacks.lr

    def start(self, group: Group) -> None:
        """A generation begins, and all members' states are equal but for what the last leader did not come to tell."""
        self._group = group
        if self._callbacks.hooks:
            if group.rank == 0:
                self._callbacks.wake(self._steps)
            else:
                self._callbacks.sleep()
            self._share(weights_changed=True)

    def epoch_begins(self, progress: Progress) -> None:
        """Runs what is due before the next step; called before every step."""
        if self._callbacks.ended < progress.epoch:  # the leader died at this point
            self.epoch_ends(progress)
        if self._callbacks.begun <= progress.epoch and not progress.stopped_early:
            self._run("on_epoch_begin", progress.epoch, {})

    def epoch_ends(self, progress: Progress) -> None:
        """The last epoch has been closed in `progress`; its metrics go to the callbacks."""
        self._run("on_epoch_end", progress.epoch - 1, dict(progress.metrics))
        progress.stopped_early = progress.stopped_early or self._callbacks.stop

    def batch_begins(self, step: int) -> None:
        self._run_batch("on_train_batch_begin", step % self._steps, {})

    def batch_ends(self, step: int, metrics: Metrics, progress: Progress) -> None:
        """Step `step` of the run has been applied, with these metrics."""
        self._run_batch("on_train_batch_end", step % self._steps, dict(metrics))
        progress.stopped_early = progress.stopped_early or self._callbacks.stop

    def validation_begins(self) -> None:
        self._tell("on_test_begin", {})

    def validation_ends(self, metrics: Metrics) -> None:
        self._tell("on_test_end", dict(metrics))

    def training_ends(self, progress: Progress) -> None:
        if self._callbacks.ended < progress.epoch:  # the leader died at this point
            self.epoch_ends(progress)
        self._run("on_train_end", dict(progress.metrics))

    def _tell(self, hook: str, *arguments: Any) -> None:
        """Runs a hook that changes nothing for the others."""
        if hook in self._callbacks.hooks and self._group.rank == 0:
            self._callbacks.run(hook, *arguments)

    def _run(self, hook: str, *arguments: Any) -> None:
        if not self._callbacks.hooks:
            return
        changed = False
        if self._group.rank == 0:
            before = weights_sha256(self._learner.weights())
            self._callbacks.run(hook, *arguments)
            changed = weights_sha256(self._learner.weights()) != before
        self._share(changed)

    def _run_batch(self, hook: str, *arguments: Any) -> None:
        if hook not in self._callbacks.hooks:
            return
        callbacks = self._callbacks
        if self._group.rank == 0:
            callbacks.run(hook, *arguments)
        if self._group.world_size > 1:
            wish = torch.tensor([math.nan if callbacks.lr is None else callbacks.lr, callbacks.stop], dtype=torch.float64)
            broadcast(wish, 0)
            lr, stop = wish.tolist()
            callbacks.lr, callbacks.stop = None if math.isnan(lr) else lr, bool(stop)

    def _share(self, weights_changed: bool) -> None:
        """Gives all members the state of the leader's callbacks, and the whole replica if a callback changed weights."""
        if self._group.world_size == 1:
            return
        mine: bytes | None = None
        if self._group.rank == 0:
            state = self._learner.state() if weights_changed else TrainState({}, optimizer=self._callbacks.state())
            mine = state.to_bytes()
        data = broadcast_bytes(mine, 0)
        if self._group.rank > 0:
            state = TrainState.from_bytes(data)
            if state.weights:
                self._learner.load(state)
            else:
                self._callbacks.load(state.optimizer)
