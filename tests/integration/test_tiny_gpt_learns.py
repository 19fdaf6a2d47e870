"""The example of the language model comes close to the best possible loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_app import runner
from raytrain_app.job import load_job
from raytrain_app.storage.rundir import RunDirectory
from raytrain_app.tasks.tiny_gpt import TASK

pytestmark = [pytest.mark.usefixtures("ray_local"), pytest.mark.slow]


def test_the_example_comes_within_five_percent_of_the_best_possible_loss(tmp_path: Path, repository: Path) -> None:
    job = load_job(str(repository / "examples" / "tiny_gpt.yaml"), ["scaling.workers=2", f"storage={tmp_path}"])
    result = runner.run(job)
    record = result.record
    rows = TASK.generate(TASK.default_source)
    assert rows is not None
    least = TASK.least_loss(rows["test"])
    lines = RunDirectory.open(result.directory).read_metrics()
    assert [line["tokens"] for line in lines] == [64 * line["samples"] for line in lines]
    assert record["tokens_per_s"] == pytest.approx(64 * record["samples_per_s"])
    assert record["model_flops_utilization"] is None  # the peak of a CPU is not known
    assert least * 0.99 < record["test_loss"] < least * 1.05
