"""What the engine sees of a framework's own callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from raytrain_app.state import Arrays


class Callbacks:
    """The callbacks of one worker's learner; this class has none.

    Those of the leading worker are awake, and its alone are run. The others keep what they need to take over.

    Attributes:
        hooks: names of the hooks that some callback has; the same on all workers.
        lr: the learning rate that callbacks have set; None is the job's.
        stop: a callback wants training to stop.
        begun, ended: epochs whose begin and end the callbacks have seen.
    """

    hooks: frozenset[str] = frozenset()
    lr: float | None = None
    stop: bool = False
    begun: int = 0
    ended: int = 0

    def wake(self, steps: int) -> None:
        """This worker leads from now on; `steps` an epoch."""

    def sleep(self) -> None:
        """Another worker leads from now on."""

    def run(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of all callbacks, and notes what they ask for."""

    def state(self) -> Arrays:
        """What survives this worker."""
        return {}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes over what `state` gave, on another worker or in an earlier run."""
