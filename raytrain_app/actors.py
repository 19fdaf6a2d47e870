"""Starting and calling Ray's actors, in the two forms that this program uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Actor = Any
"""A handle of a Ray actor."""


def start_here(kind: type, *arguments: Any, options: Mapping[str, Any] | None = None, **keywords: Any) -> Actor:
    """Starts an actor on this process's node, since elsewhere it could die with a worker's node.

    It takes no CPU, is started again when it dies, and calls to it are retried meanwhile, unless Ray's `options` say
    otherwise.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    chosen = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here, **(options or {})}
    actor: Any = ray.remote(kind)
    return actor.options(**chosen).remote(*arguments, **keywords)


def wait_for(reference: Any) -> Any:
    """The value behind a reference; blocks until it is there. Errors of the call are raised here."""
    return ray.get(reference)
