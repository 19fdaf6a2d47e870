"""TensorFlow is set up once, as a worker does it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _process() -> None:
    from raytrain_app.learners.tensorflow_process import prepare_process
    from tests.unit.learners_keras.given import make_job

    prepare_process(make_job())
