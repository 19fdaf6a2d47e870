"""A shard's kernels on a GPU, recorded once and launched again by one call: CUDA graphs.

A recording knows nothing of Python. What a task's own code decides or draws on the host happens once, when it is recorded; so
this is asked for by the job, and what can be found out about it is found out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch

from raytrain_app.errors import TrainingError

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WARM_UP = 3
"""Passes before one is recorded: libraries set themselves up in the first ones, which cannot be recorded."""
ADVICE = "Set train.cuda_graphs: false, or see the README, 'CUDA graphs'"


class Graphs:
    """Computes shards by recordings, one for each shape of rows.

    The first shard of a shape is computed as ever, then recorded, and the recording has to give the same bits.

    Args:
        compute: forward and backward of rows and labels on the GPU. It writes to memory that stays where it is, and returns
            the scores.
        vector: where it leaves the gradient.
    """

    def __init__(self, compute: Compute, vector: torch.Tensor) -> None:
        self._compute, self._vector = compute, vector
        self._recorded: dict[Hashable, _Recording] = {}
        self._memory: Any = None

    def __call__(self, rows: torch.Tensor, labels: torch.Tensor, seed: Callable[[], None]) -> torch.Tensor:
        """The scores of a shard, whose gradient is then in the vector.

        Args:
            rows, labels: on the GPU, as `compute` takes them.
            seed: sets all generators for this shard.

        Raises:
            TrainingError: the model cannot be recorded, or does something else when the recording is launched.
        """
        shape = rows.shape, rows.dtype, labels.shape, labels.dtype
        if shape not in self._recorded:
            self._recorded[shape] = self._record(rows, labels, seed)
        seed()
        return self._recorded[shape].launch(rows, labels)

    def _record(self, rows: torch.Tensor, labels: torch.Tensor, seed: Callable[[], None]) -> _Recording:
        seed()
        before = host_generators()
        scores = self._compute(rows, labels)
        if host_generators() != before:
            raise TrainingError(
                "train.cuda_graphs: the task draws random numbers on the host, which a recording would repeat in each step; "
                f"draw them on the device of its tensors. {ADVICE}"
            )
        expected = self._vector.clone(), scores.clone()
        try:
            recording = _Recording(self._compute, rows, labels, self._memory)
        except RuntimeError as error:
            raise TrainingError(f"train.cuda_graphs: the model cannot be recorded: {error}. {ADVICE}") from error
        self._memory = recording.memory
        seed()
        found = self._vector, recording.launch(rows, labels)
        if not all(map(same_bits, expected, found)):
            raise TrainingError(f"train.cuda_graphs: a recorded shard has other bits than the shard itself. {ADVICE}")
        return recording


class _Recording:
    """The kernels of one shape of rows.

    Attributes:
        memory: where its tensors are; recordings that are launched one after the other can share it.
    """

    def __init__(self, compute: Compute, rows: torch.Tensor, labels: torch.Tensor, memory: Any) -> None:
        self._rows, self._labels = rows.clone(), labels.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                compute(self._rows, self._labels)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, go on calling CUDA meanwhile.
        with torch.cuda.graph(self._graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            self._scores = compute(self._rows, self._labels)
        self.memory = self._graph.pool()

    def launch(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Computes with other rows; returns the scores."""
        self._rows.copy_(rows)
        self._labels.copy_(labels)
        self._graph.replay()
        return self._scores.clone()


def host_generators() -> tuple[object, ...]:
    """The states of the generators on the host that tasks draw from: torch's, numpy's and Python's."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - a task may use it, knowingly or not
    return torch.get_rng_state().numpy().tobytes(), name, np.asarray(keys).tobytes(), tuple(rest), random.getstate()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of a dtype and shape are the same, also where they are no numbers."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
