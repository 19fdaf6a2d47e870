"""What Ray Train's controller is given in place of its own helpers."""

from __future__ import annotations

from typing import Any

from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2.api.config import ScalingConfig

from raytrain_app.pool_controller import PoolSize


def test_a_pool_has_its_size_without_asking_anybody() -> None:
    """Ray is not up: whoever asked an actor would fail."""
    policy: Any = PoolSize(ScalingConfig(num_workers=3, resources_per_worker={"CPU": 2}))
    policy.after_controller_start(None)
    decision = policy.make_decision_for_non_running_worker_group()
    assert isinstance(decision, ResizeDecision)
    assert (decision.num_workers, decision.resources_per_worker) == (3, {"CPU": 2})
    policy.before_controller_abort()
