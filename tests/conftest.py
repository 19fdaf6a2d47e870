"""What all tests share. The folders of tests are packages, so that Ray's workers can import a test's own functions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# Machines that run tests are often busy: an example that takes long is not an error.
settings.register_profile("raytrain", settings.default, deadline=None)
settings.load_profile("raytrain")


@pytest.fixture
def repository() -> Path:
    """The root of the source tree."""
    return Path(__file__).parent.parent
