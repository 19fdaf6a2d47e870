"""A real Ray for the tests that need one, started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.integration.replicas import Replicas

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """A Ray of four CPUs in this machine, whatever it really has: the tests' workers mostly wait for each other."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, namespace="raytrain")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def replicas(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> Replicas:
    """Processes for many runs."""
    return Replicas(tmp_path_factory.mktemp("replicas"))


@pytest.fixture(scope="session")
def fashion_mnist() -> Path:
    """The folder of the four full-size Fashion-MNIST files."""
    if not FASHION_MNIST.is_dir():
        pytest.skip(f"{FASHION_MNIST} is not there; on Debian: apt-get install dataset-fashion-mnist")
    return FASHION_MNIST
