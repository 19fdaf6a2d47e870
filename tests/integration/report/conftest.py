"""One real run that all tests here look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from raytrain_app import runner
from raytrain_app.job import Job, job_from_dict
from raytrain_app.storage.folder import Folder


@dataclass(frozen=True)
class Run:
    """A finished run: its job, its directory, and the content of its result.json."""

    job: Job
    folder: Folder
    result: dict[str, Any]


@pytest.fixture(scope="session")
def run(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small network on the embedded digits, trained for two epochs by two workers."""
    job = job_from_dict(
        {
            "name": "digits",
            "task": "mnist",
            "model": {"name": "cnn", "channels": 4, "hidden": 16, "batch_norm": True},
            "train": {"epochs": 2, "global_batch_size": 100, "virtual_shards": 3},
            "optimizer": {"name": "adam", "lr": 0.01},
            "scaling": {"workers": 2, "resources_per_worker": {"CPU": 0.5}},
            "checkpoint": {"every_steps": 50},
            "storage": str(tmp_path_factory.mktemp("runs")),
        }
    )
    done = runner.run(job)
    return Run(job, Folder.open(done.directory), done.record)
