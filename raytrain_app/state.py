"""What a replica is made of: the state that is checkpointed, sent to newcomers and hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from raytrain_app.errors import StorageError

Arrays = dict[str, np.ndarray]


@dataclass
class TrainState:
    """State of one replica, on the host.

    Attributes:
        weights: parameters by name, in the framework's own shapes.
        buffers: other persistent model arrays (BatchNorm statistics).
        optimizer: optimizer slots, named `<slot>.<parameter>`.
        progress: position in the run and running totals; JSON values only.
    """

    weights: Arrays
    buffers: Arrays = field(default_factory=dict)
    optimizer: Arrays = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Serializes the state as safetensors (no pickle); `from_bytes` reads it back."""
        groups = {"weights": self.weights, "buffers": self.buffers, "optimizer": self.optimizer}
        arrays = {f"{group}/{name}": np.asarray(a, order="C") for group, named in groups.items() for name, a in named.items()}
        header = np.frombuffer(json.dumps(self.progress).encode(), np.uint8)
        return save({**arrays, "progress": header})

    @classmethod
    def from_bytes(cls, data: bytes) -> TrainState:
        """Reads what `to_bytes` wrote."""
        state = cls(weights={})
        for key, array in load(data).items():
            group, _, name = key.partition("/")
            if group == "progress":
                state.progress = json.loads(array.tobytes())
            else:
                getattr(state, group)[name] = array
        return state


def weights_sha256(weights: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over the parameters in name order, each as contiguous little-endian bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        array = weights[name]
        digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def check_names(what: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, np.ndarray]) -> None:
    """Refuses saved arrays that are not those of a model or optimizer.

    Args:
        what: what the arrays are, for the error.
        expected: their shapes by name.
        found: the arrays.

    Raises:
        StorageError: names or shapes differ.
    """
    if {name: array.shape for name, array in found.items()} != expected:
        odd = sorted(set(expected) ^ set(found)) or [n for n in expected if found[n].shape != expected[n]]
        raise StorageError(f"the saved {what} do not fit the model: {', '.join(odd[:3])}; resume with the job that wrote them")
