"""How much of its rows' tokens and of its devices' arithmetic a run gets through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raytrain_app.job import Job
from raytrain_app.task import Task

PEAK_FLOPS: dict[str, dict[str, float]] = {
    "NVIDIA B200": {"bf16": 2.25e15, "fp32": 75e12},
    "NVIDIA H200": {"bf16": 989e12, "fp32": 67e12},
    "NVIDIA H100 PCIe": {"bf16": 756e12, "fp32": 51e12},
    "NVIDIA H100 80GB HBM3": {"bf16": 989e12, "fp32": 67e12},
    "NVIDIA A100": {"bf16": 312e12, "fp32": 19.5e12},
    "NVIDIA L40S": {"bf16": 362e12, "fp32": 91.6e12},
    "NVIDIA L4": {"bf16": 121e12, "fp32": 30.3e12},
    "Tesla V100-SXM2": {"fp32": 15.7e12},
    "Tesla T4": {"fp32": 8.1e12},
}
"""Floating-point operations a second, dense, from NVIDIA's data sheets, by the beginning of the name that CUDA tells."""


def tokens_of(task: Task, samples: int) -> int | None:
    """Tokens of so many rows; None where rows are no sequences."""
    return None if task.row_tokens is None else samples * task.row_tokens


def utilization(job: Job, task: Task, samples: int, seconds: float, computes_on: Sequence[Mapping[str, str]]) -> float | None:
    """Model FLOPs utilization: the operations that the rows need, over those that the devices could have done meanwhile.

    Args:
        job: what was trained.
        task: of the job.
        samples: rows trained on.
        seconds: that the workers, each with one device, have spent on steps that counted, added up.
        computes_on: what the workers computed on, one entry a kind.

    Returns:
        Between 0 and 1; None where it cannot be told: on CPUs, on a GPU that is not in `PEAK_FLOPS`, on a mix of kinds, for
        Keras, and for models whose operations cannot be counted on torch's meta device.
    """
    peaks = {_peak(kind.get("gpu", ""), job.train.precision) for kind in computes_on}
    peak = peaks.pop() if len(peaks) == 1 else None
    if peak is None or seconds <= 0 or job.framework != "torch":
        return None
    from raytrain_app.learners.costs import row_flops

    try:
        return samples * row_flops(job, task) / (seconds * peak)
    except Exception:  # of a task's own code, which need not bear tensors without values, and the run has ended well
        return None


def _peak(gpu: str, precision: str) -> float | None:
    """Of a GPU by its name, the longest entry that fits."""
    names = [name for name in PEAK_FLOPS if gpu.startswith(name) and not gpu.removeprefix(name)[:1].isalnum()]
    return PEAK_FLOPS[max(names, key=len)].get(precision) if names else None
