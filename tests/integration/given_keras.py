"""Keras tasks from outside the package, as users bring them, with what tests need to see."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from raytrain_app.task import ModelOptions
from raytrain_app.tasks.mnist import Mnist
from raytrain_app.tasks.synthetic import Mlp, Synthetic

SECONDS_A_STEP = 0.02
"""So that faults fall between steps."""


class Telling(Synthetic):
    """Points, with callbacks that write down what they are told."""

    def keras_metrics(self, keras: Any) -> Sequence[Any]:
        return [keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")]

    def keras_callbacks(self, keras: Any, directory: str) -> Sequence[Any]:
        class Tell(keras.callbacks.Callback):  # type: ignore[misc]
            def tell(self, hook: str, number: int, logs: Any) -> None:
                with Path(directory, "told.jsonl").open("a") as file:
                    file.write(json.dumps({"hook": hook, "number": number, **(logs or {})}) + "\n")

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.tell("epoch_begin", epoch, logs)

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                time.sleep(SECONDS_A_STEP)
                self.tell("batch_end", batch, logs)

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.tell("epoch_end", epoch, logs)

        return [
            Tell(),
            keras.callbacks.LearningRateScheduler(lambda epoch, lr: 0.5 * lr if epoch else lr),
            keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(f"{directory}/epoch-{{epoch}}.keras"),
            keras.callbacks.CSVLogger(f"{directory}/log.csv"),
        ]


class Slow(Synthetic):
    """Points, the shards of which take their time; with noise, so that the result is sensitive to any change."""

    def keras_augment(self, x: Any, seed: Any) -> Any:
        import tensorflow as tf

        def wait(rows: np.ndarray) -> np.ndarray:
            time.sleep(SECONDS_A_STEP / 4)
            return rows

        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape) + 0.01 * tf.random.stateless_normal(
            tf.shape(x), seed
        )


class SpyOptions(ModelOptions):
    """A linear model, and where to write which rows it is trained on."""

    folder: str = Field(min_length=1)


class Spying(Mnist):
    """Digits; the bytes of the rows of each shard are told apart by their hash, in the order of training."""

    models: ClassVar = {"linear": SpyOptions}
    folder = ""

    def torch_model(self, name: str, options: Any) -> torch.nn.Module:
        self.folder = options.folder
        return super().torch_model(name, options)

    def keras_model(self, keras: Any, name: str, options: Any) -> Any:
        self.folder = options.folder
        return super().keras_model(keras, name, options)

    def torch_augment(self, x: torch.Tensor) -> torch.Tensor:
        self.note("torch", x.numpy())
        return x

    def keras_augment(self, x: Any, seed: Any) -> Any:
        import tensorflow as tf

        return tf.ensure_shape(tf.numpy_function(lambda rows: self.note("tensorflow", rows), [x], tf.float32), x.shape)

    def note(self, framework: str, x: np.ndarray) -> np.ndarray:
        pixels = np.round(x.reshape(len(x), 28, 28) * 255).astype(np.uint8)
        with Path(self.folder, framework).open("a") as file:
            file.write(hashlib.sha256(pixels.tobytes()).hexdigest() + "\n")
        return x


class Alone(Synthetic):
    """Points, whose PyTorch model is only built in a process without TensorFlow."""

    def torch_model(self, name: str, options: Any) -> torch.nn.Module:
        found = [module for module in ("tensorflow", "keras", "tf_keras") if module in sys.modules]
        if found:
            raise RuntimeError(f"a PyTorch worker has {', '.join(found)}")
        return super().torch_model(name, options)


class KerasOnly(Synthetic):
    """Points, with a model of Keras 3 whatever it is asked for."""

    models: ClassVar = {"mlp": Mlp}

    def keras_model(self, keras: Any, name: str, options: Any) -> Any:
        import keras as keras3

        return super().keras_model(keras3, name, options)


TELLING, SLOW, SPYING, ALONE, KERAS_ONLY = Telling(), Slow(), Spying(), Alone(), KerasOnly()
