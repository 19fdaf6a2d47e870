"""A shard's kernels on a GPU, recorded once and launched again by one call: CUDA graphs.

A recording knows nothing of Python. What a task's code decides, or draws on the host, it does once, when it is recorded; so a job
has to ask for recordings, and what can be found out about the task is found out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from raytrain_app.errors import TrainingError

Compute = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
WARM_UP = 3
"""Passes on the recording's stream before one is recorded: in the first ones libraries set themselves up, which cannot be."""
ADVICE = "Set train.cuda_graphs: false, or see the README, 'CUDA graphs'"


class Graphs:
    """Computes shards by recordings, one for each shape of rows.

    The first shard of a shape is computed as ever and then recorded, and the recording has to give the same bits.

    Args:
        compute: forward and backward of rows and labels. Whatever it reads besides stays where it is, and it leaves in the same
            places, or returns, whatever it computes.
        vector: where it leaves the gradient.
        buffers: those of the model, which it writes.
    """

    def __init__(self, compute: Compute, vector: torch.Tensor, buffers: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._compute, self._vector, self._buffers = compute, vector, buffers
        self._recordings: dict[Hashable, Recording] = {}
        self._stream: torch.cuda.Stream | None = None
        self._memory: Any = None

    def __call__(self, rows: torch.Tensor, labels: torch.Tensor, seed: Callable[[], None]) -> Sequence[torch.Tensor]:
        """Computes a shard; returns what `compute` does.

        Args:
            rows, labels: as `compute` takes them.
            seed: sets all generators for this shard.

        Raises:
            TrainingError: the model cannot be recorded, or does something else when the recording is launched.
        """
        shape = rows.shape, rows.dtype, labels.shape, labels.dtype
        if shape not in self._recordings:
            self._recordings[shape] = self._record(rows, labels, seed)
        seed()
        return self._recordings[shape].launch(rows, labels)

    def _record(self, rows: torch.Tensor, labels: torch.Tensor, seed: Callable[[], None]) -> Recording:
        seed()
        generators, buffers = host_generators(), self._buffers()
        expected = [tensor.clone() for tensor in (*self._compute(rows, labels), self._vector)]
        if host_generators() != generators:
            raise TrainingError(
                "train.cuda_graphs: the task draws random numbers on the host, which a recording would repeat in each step; "
                f"draw them on the device of its tensors. {ADVICE}"
            )
        if any(before is not after for before, after in zip(buffers, self._buffers(), strict=True)):
            raise TrainingError(
                "train.cuda_graphs: the model puts another tensor in the place of a buffer, which a recording would not see; "
                f"write to the buffer instead, as with copy_. {ADVICE}"
            )
        try:
            recording = self._capture(rows, labels)
        except RuntimeError as error:
            cause = str(_first(error)).partition("\n")[0]
            raise TrainingError(f"train.cuda_graphs: the model cannot be recorded: {cause}. {ADVICE}") from error
        seed()
        found = *recording.launch(rows, labels), self._vector
        if not all(map(same_bits, expected, found)):
            raise TrainingError(f"train.cuda_graphs: a recorded shard has other bits than the shard itself. {ADVICE}")
        return recording

    def _capture(self, rows: torch.Tensor, labels: torch.Tensor) -> Recording:
        # One stream and one memory do for all, as they are launched one after the other and their results are copied.
        self._stream = self._stream or torch.cuda.Stream()
        recording = Recording(self._compute, rows, labels, self._stream, self._memory)
        self._memory = recording.memory
        return recording


class Recording:
    """The kernels of one shape of rows.

    Attributes:
        memory: where its tensors are, for other recordings to share.
    """

    def __init__(
        self, compute: Compute, rows: torch.Tensor, labels: torch.Tensor, stream: torch.cuda.Stream, memory: Any
    ) -> None:
        self._rows, self._labels = rows.clone(), labels.clone()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # also what sets the stream back when recording fails
            for _ in range(WARM_UP):
                compute(self._rows, self._labels)
            self._graph = torch.cuda.CUDAGraph()
            # Other threads, such as NCCL's, go on calling CUDA meanwhile.
            with torch.cuda.graph(self._graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                self._results = compute(self._rows, self._labels)
        torch.cuda.current_stream().wait_stream(stream)
        self.memory = self._graph.pool()

    def launch(self, rows: torch.Tensor, labels: torch.Tensor) -> Sequence[torch.Tensor]:
        """Computes with other rows; returns copies of the results."""
        self._rows.copy_(rows)
        self._labels.copy_(labels)
        self._graph.replay()
        return [result.clone() for result in self._results]


def host_generators() -> tuple[object, ...]:
    """The states of the generators on the host that tasks draw from: torch's, numpy's and Python's."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - a task may use it, knowingly or not
    return torch.get_rng_state().numpy().tobytes(), name, np.asarray(keys).tobytes(), tuple(rest), random.getstate()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of a dtype and shape are the same, also where they are no numbers."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _first(error: BaseException) -> BaseException:
    """What went wrong first: ending a recording that is broken raises once more."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error
