"""Keras callbacks in a run of many workers, which come and go.

Every worker makes the task's callbacks, but only the leading worker's are called. What a callback has come to know since
training began (the best value so far, how many epochs to wait) is kept in every checkpoint and by every worker, so a new
leader's callbacks go on where those of the last one stopped: they begin training as Keras has it, and then get their
attributes back. Files, writers and functions that a callback holds are its own to open again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_app.errors import JobError, TrainingError
from raytrain_app.job import Job
from raytrain_app.learners.callbacks import Callbacks
from raytrain_app.state import Arrays
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.mirror import Mirror

PREFIX = "callbacks."
"""Of the names under which callbacks' state lies among the optimizer's."""
HOOKS = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_end",
)
ALIASES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}
NOT_CARRIED = ("params", "model", "_model", "min_delta")
"""Attributes that every leader gets anew. Keras turns the sign of `min_delta` when it finds out which way a metric improves."""
FILES = {"ModelCheckpoint": "filepath", "CSVLogger": "filename", "TensorBoard": "log_dir"}
"""Keras's callbacks that write files, and their attribute that says where."""
REFUSED = {
    "BackupAndRestore": "raytrain run --resume goes on from the run's own checkpoints",
    "SwapEMAWeights": "validation runs on all workers, and only the leader's weights would be swapped",
}


class KerasCallbacks(Callbacks):
    """See the module and the base class."""

    def __init__(self, make: Callable[[str], Sequence[Any]], keras: Any, model: Any, job: Job, directory: str | None) -> None:
        """Makes the callbacks.

        Args:
            make: gives the task's callbacks, which write to the folder that it is called with.
            keras: the Keras that they are of.
            model: what they are about, compiled with its optimizer.
            job: what is trained.
            directory: URI of the run directory; None makes no callbacks, since nothing is trained.

        Raises:
            JobError: one of them cannot be honoured.
        """
        self._make, self._keras, self._model, self._job = make, keras, model, job
        self._mirror = Mirror(Folder.open(directory).child("keras")) if directory is not None else None
        self._held: list[Mapping[str, Any]] = []
        self._baseline: list[Mapping[str, Any]] = []
        self._alive = False
        self._callbacks = self._made()
        self.hooks = frozenset(hook for hook in HOOKS for callback in self._callbacks if _has(keras, callback, hook))

    @property
    def reads_weights_in_batches(self) -> bool:
        """Whether hooks of batches may look at the model: the user's own may, and of Keras's those that save then."""
        hooks = ("on_train_batch_begin", "on_train_batch_end")
        own = any(_has_own(self._keras, callback, hook) for callback in self._callbacks for hook in hooks)
        return own or any(isinstance(getattr(callback, "save_freq", None), int) for callback in self._callbacks)

    def wake(self, steps: int) -> None:
        """Begins training for the callbacks, at the point where the run is."""
        if self._alive or self._mirror is None:
            return
        self._mirror.path.mkdir(parents=True, exist_ok=True)
        self._callbacks, self._alive = self._made(), True
        lr, asked, stop, goes_on = float(self._model.optimizer.learning_rate), self.lr, self.stop, bool(self._held)
        for callback in self._callbacks:
            if goes_on and isinstance(callback, self._keras.callbacks.CSVLogger):
                callback.append = True  # the file has the epochs of the last leader
            callback.set_params({"epochs": self._job.train.epochs, "steps": steps, "verbose": 0})
            callback.set_model(self._model)
        self.run("on_train_begin", {})
        if self.begun > self.ended:
            self.run("on_epoch_begin", self.begun - 1, {})
        self._baseline = [_kept(callback) for callback in self._callbacks]
        if goes_on:
            for callback, held in zip(self._callbacks, self._held, strict=False):
                if held["class"] == type(callback).__name__:
                    vars(callback).update(held["attributes"])
            self._model.optimizer.learning_rate, self.lr, self.stop = lr, asked, stop

    def sleep(self) -> None:
        self._alive = False

    def run(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of all callbacks, in order, and notes what they ask for.

        Raises:
            TrainingError: a callback sets the learning rate while the job has a schedule for it.
        """
        optimizer = self._model.optimizer
        self._model.stop_training = self.stop
        for callback in self._callbacks:
            before = float(optimizer.learning_rate)
            getattr(callback, hook)(*arguments)
            after = float(optimizer.learning_rate)
            if after != before:
                self._refuse_schedule(callback)
                self.lr = float(str(np.float32(after)))  # as it was written, not as float32 stores it
        self.stop = bool(self._model.stop_training)
        self.begun = arguments[0] + 1 if hook == "on_epoch_begin" else self.begun
        self.ended = arguments[0] + 1 if hook == "on_epoch_end" else self.ended
        if self._mirror is not None and hook in ("on_epoch_end", "on_train_end"):
            self._mirror.push()

    def state(self) -> Arrays:
        """What survives this worker, by names that start with `PREFIX`: attributes as JSON, arrays as they are."""
        if not self._callbacks:
            return {}
        if self._alive:
            self._held = [_changed(callback, fresh) for callback, fresh in zip(self._callbacks, self._baseline, strict=True)]
        plain = []
        arrays: Arrays = {}
        for number, held in enumerate(self._held):
            attributes = dict(held["attributes"])
            for name in [name for name, value in attributes.items() if _is_array(value)]:
                value = attributes.pop(name)
                if isinstance(value, np.ndarray):
                    arrays[f"{PREFIX}{number}.{name}"] = value
                else:
                    arrays |= {f"{PREFIX}{number}.{name}.{place}": array for place, array in enumerate(value)}
            plain.append({"class": held["class"], "attributes": attributes})
        known = {"lr": self.lr, "stop": self.stop, "begun": self.begun, "ended": self.ended, "callbacks": plain}
        return {f"{PREFIX}json": np.frombuffer(json.dumps(known).encode(), np.uint8), **arrays}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        found = arrays.get(f"{PREFIX}json")
        if found is None or not self._callbacks:
            return
        known = json.loads(found.tobytes())
        self.lr, self.stop, self.begun, self.ended = known["lr"], known["stop"], known["begun"], known["ended"]
        self._held, self._alive = known["callbacks"], False
        lists: dict[tuple[int, str], list[np.ndarray]] = {}
        for key, array in arrays.items():
            if key != f"{PREFIX}json":
                number, name, *place = key.removeprefix(PREFIX).split(".")
                if place:
                    lists.setdefault((int(number), name), []).append(array)
                self._held[int(number)]["attributes"][name] = lists.get((int(number), name), array)

    def _made(self) -> list[Any]:
        if self._mirror is None:
            return []
        callbacks = list(self._make(str(self._mirror.path)))
        for callback in callbacks:
            name = type(callback).__name__
            if not isinstance(callback, self._keras.callbacks.Callback):
                raise JobError(f"keras_callbacks: found a {name}; expected callbacks of {self._keras.__name__}")
            if name in REFUSED:
                raise JobError(f"keras_callbacks: {name} is not available: {REFUSED[name]}")
            self._refuse_lost_files(callback)
            if any(_has_own(self._keras, callback, hook) for hook in ("on_test_batch_begin", "on_test_batch_end")):
                raise JobError(
                    f"keras_callbacks: {name} has on_test_batch_begin or on_test_batch_end, but validation has no batches: "
                    "each worker scores its part of the rows; use on_test_end or on_epoch_end"
                )
        return callbacks

    def _refuse_lost_files(self, callback: Any) -> None:
        for kind, attribute in FILES.items():
            path = str(getattr(callback, attribute, ""))
            if isinstance(callback, getattr(self._keras.callbacks, kind)) and not (Path(path).is_absolute() or "://" in path):
                raise JobError(
                    f"keras_callbacks: {type(callback).__name__} writes to {path!r}, in the working folder of whichever worker "
                    f'leads, where nobody finds it; expected a path below the argument directory, such as f"{{directory}}/{path}"'
                )

    def _refuse_schedule(self, callback: Any) -> None:
        if self._job.optimizer.schedule != "constant":
            raise TrainingError(
                f"the callback {type(callback).__name__} set the learning rate, but the job has optimizer.schedule: "
                f"{self._job.optimizer.schedule}; use schedule: constant, or drop the callback"
            )


def _has(keras: Any, callback: Any, hook: str) -> bool:
    base = keras.callbacks.Callback
    names = [hook, ALIASES.get(hook, hook)]
    return any(name in vars(callback) or getattr(type(callback), name) is not getattr(base, name) for name in names)


def _has_own(keras: Any, callback: Any, hook: str) -> bool:
    """Whether the hook is written by the user: Keras's own callbacks bear to miss it."""
    methods = [getattr(callback, name) for name in (hook, ALIASES.get(hook, hook))]
    return _has(keras, callback, hook) and not all(str(m.__module__).startswith(f"{keras.__name__}.") for m in methods)


def _kept(callback: Any) -> dict[str, Any]:
    """The attributes that can travel, copied: plain values and arrays."""
    own = {name: value for name, value in vars(callback).items() if name not in NOT_CARRIED}
    return {name: _python(value) for name, value in own.items() if _is_plain(value) or _is_array(value)}


def _changed(callback: Any, fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are no longer as they were when training began here; what is, a new leader's callback has by itself."""
    now = _kept(callback)
    attributes = {name: value for name, value in now.items() if _is_array(value) or name not in fresh or value != fresh[name]}
    return {"class": type(callback).__name__, "attributes": attributes}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | np.generic)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (isinstance(value, list) and bool(value) and all(map(_is_ndarray, value)))


def _is_ndarray(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _python(value: Any) -> Any:
    """The value without numpy's scalars, copied."""
    if isinstance(value, Mapping):
        return {key: _python(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_python(inner) for inner in value]
    return value.item() if isinstance(value, np.generic) else value
