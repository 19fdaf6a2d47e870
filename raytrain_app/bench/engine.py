"""The exact step without Ray around it, and where its time goes. A script like `plain_torch`, and asked like it."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from raytrain_app.bench.plain_torch import answer, join_group, steps_asked
from raytrain_app.bench.random_images import TASK
from raytrain_app.elastic import segments
from raytrain_app.elastic.plan import owned_shards, shard_seed, training_rows
from raytrain_app.elastic.reduce import Ready, Reducer, Shard
from raytrain_app.job import Job, job_from_dict
from raytrain_app.strategies.worker import build_learner, prepare_process

T = TypeVar("T")


class Engine:
    """One worker's learner and reducer, with a clock at each part of the step."""

    def __init__(self, job: Job, rank: int, world_size: int, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._job, self._device, self._taken = job, device, 0
        self._learner = build_learner(job, TASK, device)
        owned = owned_shards(rank, world_size, job.num_shards)
        spans = [training_rows(job.train.global_batch_size, job.num_shards, shard) for shard in (owned[0], owned[-1])]
        self._mine = slice(spans[0].start, spans[1].stop)
        self._reducer = Reducer(rank, world_size, job.num_shards, self._learner.layout, 4, device)
        for segment in self._reducer.segments:
            segment.receive_sums = self._timed("exchange", segment.receive_sums)  # type: ignore[method-assign]
            segment.receive_means = self._timed("exchange", segment.receive_means)  # type: ignore[method-assign]
        self._x, self._y = TASK.generate(str(job.data.source))["train"]
        self._order = np.random.default_rng(0).permutation(len(self._y)).reshape(-1, job.train.global_batch_size)

    def step(self) -> None:
        """Takes a step as `AllReduce` does."""
        ids = self._order[self._taken % len(self._order)][self._mine]
        x, y = self._timed("data", lambda: (self._x.take(ids, axis=0), self._y.take(ids)))()
        num_rows, num_shards = self._job.train.global_batch_size, self._job.num_shards

        def shard(number: int, ready: Ready | None) -> Shard:
            part = training_rows(num_rows, num_shards, number)
            inside = slice(part.start - self._mine.start, part.stop - self._mine.start)
            return self._learner.shard(x[inside], y[inside], shard_seed([0, 0, self._taken, number]), ready)

        before = self.seconds["forward and backward"] + self.seconds["exchange"]
        began_s = time.perf_counter()
        total = self._reducer.reduce(self._timed("forward and backward", shard), num_rows, num_shards, [0, 0, 0, 0])
        inside_s = self.seconds["forward and backward"] + self.seconds["exchange"] - before
        self.seconds["conversion and sum"] += time.perf_counter() - began_s - inside_s
        self._timed("update", self._learner.apply)(total.mean, total.counters, self._job.optimizer.lr)
        self._taken += 1

    def _timed(self, part: str, function: Callable[..., T]) -> Callable[..., T]:
        def timed(*arguments: Any) -> T:
            began_s = time.perf_counter()
            result = function(*arguments)
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            self.seconds[part] += time.perf_counter() - began_s
            return result

        return timed


def main(config: dict[str, Any]) -> None:
    """Trains on demand.

    Args:
        config: `job` and `device`; with `overlap` false, long vectors go as one segment, so that each part has its own time.
    """
    if not config.get("overlap", True):
        segments.SEGMENT_BYTES = sys.maxsize
    job = job_from_dict(config["job"])
    prepare_process(job)
    rank, world_size, device = join_group(config["device"])
    engine = Engine(job, rank, world_size, device)
    while (count := steps_asked(rank, world_size)) > 0:
        engine.seconds.clear()
        began_s = time.perf_counter()
        for _ in range(count):
            engine.step()
        step_s = (time.perf_counter() - began_s) / count
        if rank == 0:
            answer({"step": step_s, **{part: seconds / count for part, seconds in engine.seconds.items()}})
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
