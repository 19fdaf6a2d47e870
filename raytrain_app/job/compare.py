"""Which differences between two jobs change the result of training."""

from __future__ import annotations

import json
from typing import Any

from raytrain_app.job.model import Job

# Sections and keys that a resumed run may change freely: where it runs, how it is watched, where it is kept.
FREE = (
    *("name", "storage", "scaling", "checkpoint", "failure", "audit", "tensorboard", "trackers"),
    *("train.cuda_graphs", "data.offline", "data.allow_modified", "strategy.servers", "strategy.server_cpus"),
    # How a replica is cut changes the last bits of what is computed from then on, and no more.
    *(f"strategy.{way}" for way in ("fsdp", "tensor", "pipeline", "microbatches", "schedule")),
    *(f"strategy.{way}" for way in ("stages_per_worker", "balance", "activation_checkpointing")),
)


def result_differences(old: Job, new: Job) -> list[str]:
    """Keys that change the result and differ, each as "key: old before, new now"; empty when `new` may resume `old`."""
    before, after = _result_keys(old), _result_keys(new)
    return [
        f"{key}: {_show(before, key)} before, {_show(after, key)} now"
        for key in dict.fromkeys([*before, *after])
        if _show(before, key) != _show(after, key)
    ]


def _result_keys(job: Job) -> dict[str, Any]:
    keys = _flat(job.model_dump())
    keys = {key: value for key, value in keys.items() if not any(key == free or key.startswith(free + ".") for free in FREE)}
    return {**keys, "train.virtual_shards": job.num_shards, "scaling.device": "cuda" if job.scaling.uses_gpu else "cpu"}


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, dict) and value:
            keys.update(_flat(value, f"{prefix}{name}."))
        else:
            keys[prefix + name] = value
    return keys


def _show(keys: dict[str, Any], key: str) -> str:
    return json.dumps(keys[key], ensure_ascii=False) if key in keys else "not set"
