"""Checkpoints: folders of safetensors files that count only once their manifest, written last, says they are whole.

`step-00000200/` holds `weights.safetensors` (parameters and buffers), `optimizer.safetensors` and `manifest.json`: the
position in the run, the metrics, and size and SHA-256 of the other files. A writer that dies leaves a folder without a
manifest, which is no checkpoint. Beside the folders, the small files `latest` and `best` name one of them each.

Of a replica in parts each worker writes a file of its own, instead of those two; `load` joins them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from raytrain_app.errors import StorageError, TrainingError
from raytrain_app.state import Arrays, TrainState, weights_sha256
from raytrain_app.storage.folder import Folder

MANIFEST, WEIGHTS, OPTIMIZER = "manifest.json", "weights.safetensors", "optimizer.safetensors"
PART_SUFFIX = ".part.safetensors"
PART_POLL_S = 0.05


class Damaged(Exception):
    """A checkpoint is not what its manifest says; the message says in what."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        step: steps applied.
        metrics: by name; None where the value was not finite.
        progress: `TrainState.progress`.
        buffers: names of the arrays in weights.safetensors that are not parameters.
        weights_sha256: hash of the parameters, as in result.json; empty for a checkpoint in parts, which nobody has as a whole.
        files: {name: {"bytes": size, "sha256": hex digest}}.
    """

    step: int
    metrics: dict[str, float | None]
    progress: dict[str, Any]
    buffers: list[str]
    weights_sha256: str
    files: dict[str, dict[str, Any]]

    def to_bytes(self) -> bytes:
        """JSON that ends with a hash of itself."""
        content = json.loads(json.dumps(vars(self)))  # as it will be read, with text for keys
        return json.dumps({**content, "sha256": _sha256(_canonical(content))}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Reads what `to_bytes` wrote.

        Raises:
            Damaged: it is something else.
        """
        try:
            content = json.loads(data)
            if content.pop("sha256") != _sha256(_canonical(content)):
                raise Damaged(f"{MANIFEST} does not match its own hash")
            return cls(**content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise Damaged(f"{MANIFEST} is not readable") from None


class CheckpointStore:
    """The checkpoints of one run.

    The newest `keep` checkpoints stay, and the best one, so there may be `keep + 1`. Of equally good ones the earlier is
    the best. One process at a time may save; any may read.

    Args:
        folder: where checkpoints are, one folder each.
        keep: how many of the newest stay.
        monitor: the metric that tells the best.
        mode: "min" or "max": which way it gets better.
    """

    def __init__(self, folder: Folder, keep: int, monitor: str, mode: str) -> None:
        self._folder, self._keep, self._monitor, self._sign = folder, keep, monitor, -1.0 if mode == "max" else 1.0

    def save(self, step: int, state: TrainState, metrics: Mapping[str, float]) -> str:
        """Writes a checkpoint, replacing one of the same step, then updates `latest` and `best` and prunes.

        Args:
            step: steps applied.
            state: what to keep.
            metrics: known at this step; without a finite value of the monitored one it cannot become the best.

        Returns:
            URI of the checkpoint's folder.

        Raises:
            StorageError: it could not be written; the others are as before.
            TrainingError: a weight is not finite; nothing is written.
        """
        _refuse_not_finite(step, state.weights)
        name = _name(step)
        content = {WEIGHTS: _pack({**state.weights, **state.buffers}), OPTIMIZER: _pack(state.optimizer)}
        manifest = Manifest(
            step,
            _finite(metrics),
            state.progress,
            sorted(state.buffers),
            weights_sha256(state.weights),
            {file: {"bytes": len(data), "sha256": _sha256(data)} for file, data in content.items()},
        )
        if not self._holds(name, manifest):  # else the manifest alone is replaced, and there is no time without a checkpoint
            self._folder.delete(f"{name}/{MANIFEST}")
            for file, data in content.items():
                self._folder.write(f"{name}/{file}", data)
        return self._publish(manifest)

    def save_part(self, step: int, attempt: str, place: int, data: bytes) -> None:
        """Writes what `parts.pack_part` made on the worker at `place`; it counts once `publish_parts` has found all parts.

        Args:
            step: steps applied.
            attempt: names the save, so that files of one that failed are not taken for its own.
            place: of the worker in its replica.
            data: content of the file.
        """
        part = f"{_name(step)}/{_part(attempt, place)}"
        self._folder.write(part, data)
        self._folder.write(f"{part}.json", json.dumps({"bytes": len(data), "sha256": _sha256(data)}).encode())

    def publish_parts(
        self, step: int, attempt: str, peers: int, progress: dict[str, Any], metrics: Mapping[str, float], timeout_s: float
    ) -> str:
        """Waits until all `peers` workers have written their parts, then does what `save` does last.

        Raises:
            StorageError: a part did not come within `timeout_s`.
        """
        name, files, deadline_s = _name(step), {}, time.monotonic() + timeout_s
        for part in (_part(attempt, place) for place in range(peers)):
            while not self._folder.exists(f"{name}/{part}.json"):
                if time.monotonic() > deadline_s:
                    raise StorageError(f"checkpoint {self._folder.at(name)}: {part} was not written within {timeout_s:g} s")
                time.sleep(PART_POLL_S)
            files[part] = json.loads(self._folder.read_text(f"{name}/{part}.json"))
        return self._publish(Manifest(step, _finite(metrics), progress, [], "", files))

    def _publish(self, manifest: Manifest) -> str:
        name = _name(manifest.step)
        self._folder.write(f"{name}/{MANIFEST}", manifest.to_bytes())
        self._folder.write("latest", f"{name}\n".encode())
        self._tidy(manifest.step)
        return self._folder.child(name).uri

    def attach(self, step: int, name: str, data: bytes) -> None:
        """Puts a file beside those of a checkpoint, with which it is deleted; `load` does not look at it.

        Raises:
            StorageError: it cannot be written.
        """
        self._folder.write(f"{_name(step)}/{name}", data)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that have a manifest, in order."""
        return sorted(step for step, files in self._folders().items() if MANIFEST in files)

    def load(self, which: str = "latest") -> tuple[TrainState, int, list[str]] | None:
        """Reads a checkpoint, every byte of it checked against its manifest.

        Args:
            which: "latest", "best", or the name of one, such as "step-00000200".

        Returns:
            The state, its step, and a message for each checkpoint that was passed over because it is damaged or unfinished;
            None if there is none at all.

        Raises:
            StorageError: the one asked for is not there, or all are damaged.
        """
        folders = self._folders()
        if which in ("latest", "best"):
            candidates = sorted(folders, reverse=True) if which == "latest" else [step for step, _ in self._ranked(folders)]
        else:
            candidates = [step for step in folders if which == _name(step)]
            if not candidates:
                there = ", ".join(map(_name, self.steps())) or "none"
                raise StorageError(f"there is no checkpoint {which!r} in {self._folder.at('')}; there are: {there}")
        messages: list[str] = []
        for step in candidates:
            try:
                return self._read(step), step, messages
            except Damaged as damage:
                messages.append(f"checkpoint {self._folder.at(_name(step))} cannot be used: {damage}")
        if any(MANIFEST in folders[step] for step in candidates) or which not in ("latest", "best"):
            raise StorageError(". ".join([*messages, "No other checkpoint is left to use; delete the folder to start over"]))
        return None

    def _read(self, step: int) -> TrainState:
        name = _name(step)
        folder = self._folder.child(name)
        sizes = folder.files()
        manifest = self._manifest(step, sizes)
        content = {}
        for file, expected in manifest.files.items():
            if sizes.get(file) != expected["bytes"]:
                found = f"{sizes[file]} bytes" if file in sizes else "missing"
                raise Damaged(f"{file} is {found}, expected {expected['bytes']} bytes")
            content[file] = folder.read(file)
            if _sha256(content[file]) != expected["sha256"]:
                raise Damaged(f"{file} has other bytes than were written")
        if WEIGHTS not in content:
            return TrainState(*_joined(content), manifest.progress)
        weights, optimizer = _unpack(content, WEIGHTS), _unpack(content, OPTIMIZER)
        buffers = {key: weights.pop(key) for key in manifest.buffers}
        return TrainState(weights, buffers, optimizer, manifest.progress)

    def _manifest(self, step: int, files: Mapping[str, int]) -> Manifest:
        if MANIFEST not in files:
            raise Damaged(f"it was never finished (no {MANIFEST})")
        return Manifest.from_bytes(self._folder.read(f"{_name(step)}/{MANIFEST}"))

    def _holds(self, name: str, manifest: Manifest) -> bool:
        """Whether the checkpoint's files are there already, as after a resume at its step."""
        files = self._folder.child(name).files()
        if MANIFEST not in files:
            return False
        return all(
            files.get(file) == expected["bytes"] and _sha256(self._folder.read(f"{name}/{file}")) == expected["sha256"]
            for file, expected in manifest.files.items()
        )

    def _ranked(self, folders: Mapping[int, Mapping[str, int]]) -> Iterator[tuple[int, float]]:
        """Steps that have a finite value of the monitored metric, the best first."""
        scores = []
        for step, files in folders.items():
            try:
                value = self._manifest(step, files).metrics.get(self._monitor)
            except Damaged:
                continue  # `load` says so when it comes to use it
            if value is not None:
                scores.append((self._sign * value, step))
        yield from ((step, self._sign * score) for score, step in sorted(scores))

    def _tidy(self, newest: int) -> None:
        """Names the best and deletes what is neither recent nor best; folders of later steps are left to their own saves."""
        folders = self._folders()
        best = next((step for step, _ in self._ranked(folders)), None)
        if best is not None:
            self._folder.write("best", f"{_name(best)}\n".encode())
        earlier = sorted(step for step, files in folders.items() if step <= newest and MANIFEST in files)
        for step in folders:
            if step < newest and step != best and step not in earlier[-self._keep :]:
                self._folder.delete(f"{_name(step)}/{MANIFEST}")  # first, so that half a deletion leaves no half checkpoint
                self._folder.delete(_name(step))

    def _folders(self) -> dict[int, dict[str, int]]:
        """The files (and sizes) of each checkpoint folder, finished or not, by step."""
        folders: dict[int, dict[str, int]] = {}
        for path, size in self._folder.files().items():
            if match := re.fullmatch(r"step-(\d{8,})/(.+)", path):
                folders.setdefault(int(match[1]), {})[match[2]] = size
        return folders


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _part(attempt: str, place: int) -> str:
    return f"{attempt}-{place:03d}{PART_SUFFIX}"


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}


def _joined(files: Mapping[str, bytes]) -> tuple[Arrays, Arrays, Arrays]:
    """Weights, no buffers, and the optimizer's state from the files of all parts."""
    from raytrain_app.storage.parts import join_parts  # with torch, which whole checkpoints do without

    try:
        arrays = join_parts(files)
    except ValueError as error:
        raise Damaged(f"its parts do not fit together: {error}") from None
    weights, optimizer = (
        {key.removeprefix(group): array for key, array in arrays.items() if key.startswith(group)}
        for group in ("weights/", "optimizer/")
    )
    return weights, {}, optimizer


def _refuse_not_finite(step: int, weights: Arrays) -> None:
    for name, array in weights.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise TrainingError(
                f"weights {name!r} are not finite at step {step}, so no checkpoint was written; lower optimizer.lr"
            )


def _pack(arrays: Arrays) -> bytes:
    return safetensors.save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def _unpack(content: Mapping[str, bytes], file: str) -> Arrays:
    try:
        return {name: array.copy() for name, array in safetensors.load(content[file]).items()}  # copies can be written to
    except (KeyError, SafetensorError):
        raise Damaged(f"{file} is not readable") from None


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
