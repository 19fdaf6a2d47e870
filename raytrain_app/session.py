"""The connection to Ray: an existing cluster where one is named, else Ray on this machine for the time of the run."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ray

from raytrain_app.errors import ClusterError

NAMESPACE = "raytrain"


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Imports a module beside the block, which ends when both are done; an error comes again where it is imported next."""

    def load() -> None:
        with suppress(Exception):
            importlib.import_module(module)

    thread = threading.Thread(target=load, name="import")
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Connects to Ray for the block; leaves a Ray that was there before as it was.

    Args:
        address: of a cluster, or "local" for a Ray of its own; None is the cluster of a submitted job or of RAY_ADDRESS, and
            without one "local".

    Raises:
        ClusterError: there is no cluster at the address.
    """
    if ray.is_initialized():
        yield
        return
    # Ray Train's controller looks after its workers this often; it learns the interval from the driver's environment.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # Ray hands the driver's path to the workers, so that they find the user's task
    target = address or os.environ.get("RAY_ADDRESS") or "local"
    if target != "local":
        os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # shows the pools in the dashboard's Train tab
    try:
        ray.init(address=target, namespace=NAMESPACE, include_dashboard=False if target == "local" else None, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"cannot connect to a Ray cluster at {target!r}: {' '.join(str(error).split())}; "
            "start one with `ray start --head` or `ray up cluster.yaml`, or leave --address out to train on this machine"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
