"""Throughput: tokens of rows, and how much of a device's peak a run reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raytrain_app.job import Job, job_from_dict
from raytrain_app.learners.costs import row_flops
from raytrain_app.tasks.synthetic import TASK as SYNTHETIC
from raytrain_app.tasks.tiny_gpt import TASK, TinyGpt
from raytrain_app.throughput import tokens_of, utilization


def make_job(**train: Any) -> Job:
    return job_from_dict({"name": "gpt", "task": "tiny_gpt", "model": {"name": "gpt", "layers": 1}, "train": train})


def test_rows_of_a_language_have_tokens() -> None:
    assert tokens_of(TASK, 10) == 640
    assert tokens_of(SYNTHETIC, 10) is None


def test_utilization_is_that_of_the_known_device() -> None:
    job = make_job(precision="bf16")
    samples = 1_000_000
    seconds = samples * row_flops(job, TASK) / (0.4 * 989e12)  # at 40 % of the peak
    assert utilization(job, TASK, samples, seconds, [{"gpu": "NVIDIA H200"}]) == pytest.approx(0.4)
    assert utilization(job, TASK, samples, seconds, [{"gpu": "NVIDIA H100 80GB HBM3"}]) == pytest.approx(0.4)
    assert utilization(job, TASK, samples, seconds, [{"gpu": "NVIDIA H100 PCIe"}]) == pytest.approx(0.4 * 989 / 756)
    full = utilization(make_job(), TASK, samples, seconds, [{"gpu": "NVIDIA H200"}])
    assert full == pytest.approx(0.4 * 989 / 67)


def test_a_model_that_cannot_be_counted_has_no_utilization() -> None:
    class Odd(TinyGpt):
        def torch_inputs(self, x: torch.Tensor) -> torch.Tensor:
            return super().torch_inputs(x) % int(x.max())

    assert utilization(make_job(), Odd(), 1000, 1.0, [{"gpu": "NVIDIA H200"}]) is None


@pytest.mark.parametrize(
    "computes_on", [[{}], [{"gpu": "NVIDIA L40"}], [{"gpu": "Tesla T4"}], [{"gpu": "NVIDIA L4"}, {"gpu": "NVIDIA H200"}], []]
)
def test_where_the_peak_is_not_known_nothing_is_claimed(computes_on: list[dict[str, str]]) -> None:
    """A T4 has no bfloat16; an L40 is no L4."""
    assert utilization(make_job(precision="bf16"), TASK, 1000, 1.0, computes_on) is None
