"""What a user brings to train: the shape of the rows, the models, the loss and what counts as correct.

A task is one file that defines a subclass of `Task` and an instance of it. Built-in tasks are found by their name
(`task: mnist`), a user's own by `package.module:TASK`. Only that name travels to the workers; each of them imports the
task and builds its model itself.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from raytrain_app.errors import JobError

if TYPE_CHECKING:
    import tensorflow as tf
    import torch

BUILT_IN = {name: f"raytrain_app.tasks.{name}:TASK" for name in ("mnist", "synthetic", "tiny_gpt")}


class ModelOptions(BaseModel):
    """Base of a model's own options (the keys beside `name` under `model:`); unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Columns:
    """What every row must look like after reading.

    Attributes:
        shape: shape of one `x`, such as (28, 28).
        dtype: numpy name of the dtype of `x`: "uint8", "float32", ...
        num_classes: labels `y` are integers in [0, num_classes).
        x_names: column names accepted for `x`, in order of preference, where the source has named columns.
        y_names: the same for `y`.
    """

    shape: tuple[int, ...]
    dtype: str
    num_classes: int
    x_names: tuple[str, ...] = ("x", "image", "images", "pixels", "features")
    y_names: tuple[str, ...] = ("y", "label", "labels", "target")


@dataclass(frozen=True)
class Pictures:
    """How the images that a model was trained on look, so that others can be made to look like them.

    Attributes:
        light_on_dark: the thing is light and what is around it dark.
        ink: pixels that the longer side of the thing has, which lies with its centre of mass in the middle; None where the
            picture as a whole is the thing.
    """

    light_on_dark: bool = False
    ink: int | None = None


@dataclass(frozen=True)
class Cut:
    """How a PyTorch model can be cut over the workers of `strategy: model_parallel`. Modules are named as in the model.

    Attributes:
        chain: modules that `forward` calls one after the other, each with what the one before returned; a ModuleList stands
            for its members. Needed for `pipeline`.
        columns: patterns of the names of linear layers whose outputs are divided under `tensor`.
        rows: patterns of those whose inputs are divided, and which add up what the workers have; each comes after `columns`.
        heads: a number that `tensor` must divide, such as attention heads.
    """

    chain: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    heads: int | None = None


Rows = tuple[np.ndarray, np.ndarray]


class Task:
    """Base class of all tasks. Override what differs from image classification with cross-entropy.

    The engine trains on the SUM of the losses of a shard and divides by the global batch, so `torch_loss` returns a sum.

    `self.columns.num_classes` is the job's `data.classes` where it names them, so models should have that many outputs.

    Methods named `keras_...` get the Keras to build with as their argument `keras`: Keras 3, or tf_keras under
    `strategy.tf_distribute`. A task that builds with it trains under both.
    """

    columns: Columns
    models: ClassVar[Mapping[str, type[ModelOptions]]]
    default_source: ClassVar[str] = "mnist-sample"
    row_tokens: ClassVar[int | None] = None
    """Tokens of a row that are predicted, where rows are sequences: throughput is then also told in tokens."""

    def generate(self, source: str) -> Mapping[str, Rows] | None:
        """Rows that the task makes itself instead of reading them.

        Args:
            source: the job's `data.source`.

        Returns:
            {"train": (x, y), "test": (x, y)} with x of shape (rows, *columns.shape) and y int64 of shape (rows,), or
            None when `source` names something to be read.
        """
        return None

    def least_loss(self, rows: Rows) -> float | None:
        """The loss that the best possible model has on rows as `generate` makes them; None where it is not known."""
        return None

    def prepare(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Turns a batch of the source's raw columns into columns named by `columns.x_names` and `columns.y_names`.

        Runs in Ray Data, before validation, once per run. The default changes nothing.
        """
        return batch

    def probabilities(self, outputs: np.ndarray) -> np.ndarray:
        """Turns what a model of this task puts out into the probability of each class.

        Args:
            outputs: float32, (rows, ...).

        Returns:
            float64 of shape (rows, classes); every row sums to 1.
        """
        shifted = np.exp(outputs.astype(np.float64) - outputs.max(axis=-1, keepdims=True))
        return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text, the beginning of a row, where rows are texts: `raytrain predict` then goes on with texts.

        Raises:
            ValueError: the text has something that no row can have; the message says what.
        """
        raise NotImplementedError(f"rows of task {type(self).__name__} are no texts")

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens (n,)."""
        raise NotImplementedError(f"rows of task {type(self).__name__} are no texts")

    def pictures(self, source: str) -> Pictures:
        """How pictures are to be made like the rows of a source, for `raytrain predict`."""
        return Pictures()

    def torch_model(self, name: str, options: Any) -> torch.nn.Module:
        """Builds model `name`; `options` is an instance of `models[name]`. Random generators are seeded by the caller."""
        raise JobError(
            f"task {type(self).__name__} has no PyTorch models; it must define torch_model to train with framework: torch"
        )

    def torch_cut(self, name: str, options: Any) -> Cut:
        """How model `name` can be cut; the default fits every model, and allows `fsdp` alone."""
        return Cut()

    def torch_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Turns stored rows (batch, *shape) on the device into what the model takes: uint8 becomes float32 in [0, 1]."""
        import torch

        return x.to(torch.float32) / 255.0 if x.dtype == torch.uint8 else x

    def torch_targets(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What the outputs are compared with, from stored rows x (batch, *shape) and labels y (batch,): the labels.

        A model of sequences overrides it, as its targets are in the rows themselves.
        """
        return y

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        """Changes training inputs at random; torch's, numpy's and Python's generators are seeded per shard before."""
        return x

    def torch_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Sum (not mean) of the losses of the rows of a batch, a scalar; `y` is what `torch_targets` returned."""
        import torch

        return torch.nn.functional.cross_entropy(outputs, y, reduction="sum")

    def torch_correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Number of rows predicted correctly, a scalar; a row with several predictions counts by the share that is right."""
        return (outputs.argmax(dim=1) == y).sum()

    def keras_model(self, keras: Any, name: str, options: Any) -> Any:
        """Builds Keras model `name`; `options` is an instance of `models[name]`. Random generators are seeded by the caller.

        The model takes what `keras_inputs` returns. It need not be compiled.
        """
        raise JobError(f"task {type(self).__name__} has no Keras models; it must define keras_model for framework: tensorflow")

    def keras_inputs(self, x: tf.Tensor) -> tf.Tensor:
        """Turns stored rows (batch, *shape) into what the model takes: uint8 becomes float32 in [0, 1]. Is traced."""
        import tensorflow as tf

        return tf.cast(x, tf.float32) / 255.0 if x.dtype == tf.uint8 else x

    def keras_augment(self, x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Changes training inputs at random. Is traced, so all randomness must come from `seed` or from Keras.

        Args:
            x: what `keras_inputs` returned.
            seed: int32 of shape (2,), another one for each shard and step, for `tf.random.stateless_uniform`,
                `tf.image.stateless_random_flip_left_right` and the like. `keras.random` and Keras layers work too.
        """
        return x

    def keras_loss(self, keras: Any) -> Any:
        """A Keras loss, the name of one, or a function of (y, outputs) that returns one number a row."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def keras_correct(self, outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Number of rows predicted correctly, an integer scalar. Is traced."""
        import tensorflow as tf

        return tf.math.count_nonzero(tf.argmax(outputs, axis=-1) == y)

    def keras_metrics(self, keras: Any) -> Sequence[Any]:
        """Metrics beside loss and accuracy, as objects or names; their values are global, and exact as the loss is."""
        return ()

    def keras_optimizer(self, keras: Any, lr: float) -> Any:
        """An optimizer, or the name of one, in place of the job's; None is the job's. `lr` is the job's learning rate."""
        return None

    def keras_callbacks(self, keras: Any, directory: str) -> Sequence[Any]:
        """Keras callbacks, which run once for the job.

        Every worker makes them, but only those of the leading worker are called. Numbers, texts, arrays, and lists and
        dicts of these that a callback keeps as attributes are in every checkpoint and go to a new leader.

        Args:
            directory: where callbacks may write files, which end up below `keras/` in the run directory.
        """
        return ()


def load_task(name: str, num_classes: int | None = None) -> Task:
    """Finds a task by built-in name or `package.module:TASK`; the current folder is searched too.

    Args:
        name: the job's `task`.
        num_classes: the job's `data.classes`, in place of the task's own number.

    Raises:
        JobError: there is no such task, its module cannot be imported, or the name is not a `Task`.
    """
    target = BUILT_IN.get(name, name)
    if ":" not in target:
        near = difflib.get_close_matches(name, BUILT_IN, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise JobError(f"task: {name!r} is not a built-in task ({', '.join(BUILT_IN)}) nor of the form package.module:TASK{hint}")
    module_name, _, attribute = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise _import_error(module_name, error) from error
        raise JobError(
            f"task: module {error.name!r} was not found in {os.getcwd()} or the installed packages; "
            f"run raytrain in the folder that has it, or install the package that does"
        ) from None
    except Exception as error:  # it is the user's code, which may raise anything
        raise _import_error(module_name, error) from error
    task = getattr(module, attribute, None)
    if not isinstance(task, Task):
        found = "nothing" if task is None else f"a {type(task).__name__}"
        raise JobError(
            f"task: {module_name} has {found} under the name {attribute!r}; expected an instance of raytrain_app.task.Task"
        )
    if num_classes not in (None, task.columns.num_classes):
        task = copy.copy(task)
        task.columns = dataclasses.replace(task.columns, num_classes=num_classes)
    return task


def _import_error(module_name: str, error: Exception) -> JobError:
    """An error of the task's own module, with the line that raised it."""
    last = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")][-1]
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (last.filename, last.lineno)
    said = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return JobError(f"task: {file}, line {line}: {type(error).__name__}: {said}; mend it, for {module_name} cannot be imported")
