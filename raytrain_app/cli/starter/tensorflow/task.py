"""What to train: the rows, the models and, where they differ from the usual, the loss, the metrics and the callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from raytrain_app.task import Columns, ModelOptions, Pictures, Task


class MlpOptions(ModelOptions):
    """Keys that the job file may give beside `name: mlp`."""

    hidden: int = Field(128, ge=1)


class MyTask(Task):
    """Pictures of 28 x 28 grey pixels in ten classes."""

    columns = Columns(shape=(28, 28), dtype="uint8", num_classes=10)
    models = {"mlp": MlpOptions}

    def keras_model(self, keras: Any, name: str, options: Any) -> Any:
        """Builds the model; it gets float32 pixels in [0, 1] of shape (batch, 28, 28) and returns scores of the classes."""
        layers = keras.layers
        return keras.Sequential(
            [
                layers.Input(self.columns.shape),
                layers.Flatten(),
                layers.Dense(options.hidden, activation="relu"),
                layers.Dense(self.columns.num_classes),
            ]
        )

    def keras_callbacks(self, keras: Any, directory: str) -> Sequence[Any]:
        """Keras callbacks run once for the job, however many workers train; `directory` is keras/ in the run directory."""
        return [keras.callbacks.CSVLogger(f"{directory}/log.csv")]

    def pictures(self, source: str) -> Pictures:
        """What `raytrain predict` turns other pictures into: light digits on dark, 20 of 28 pixels high or wide, as MNIST is."""
        return Pictures(light_on_dark=True, ink=20)

    # Also to override, with what they do by default in raytrain_app/task.py: prepare (raw columns to x and y),
    # keras_inputs (stored rows to model inputs), keras_augment, keras_loss, keras_correct, keras_metrics, keras_optimizer.


TASK = MyTask()
