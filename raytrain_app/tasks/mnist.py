"""MNIST and everything shaped like it: 28 x 28 grey images, in ten classes unless `data.classes` says otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import nn

from raytrain_app.task import Columns, ModelOptions, Pictures, Task

if TYPE_CHECKING:
    import tensorflow as tf


class Linear(ModelOptions):
    """Softmax regression: 7,850 parameters."""


class Mlp(ModelOptions):
    """One hidden layer: 101,770 parameters with 128 units."""

    hidden: int = Field(128, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)


class Cnn(ModelOptions):
    """Two convolutions with pooling and one hidden layer: about 100,000 parameters."""

    channels: int = Field(16, ge=1)
    hidden: int = Field(64, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    batch_norm: bool = False


class Mnist(Task):
    """Digits, fashion articles, or the user's own 28 x 28 images."""

    columns = Columns(shape=(28, 28), dtype="uint8", num_classes=10)
    models = {"linear": Linear, "mlp": Mlp, "cnn": Cnn}

    def pictures(self, source: str) -> Pictures:
        """Digits are 20 pixels high or wide in the middle of 28 x 28; fashion articles fill the picture."""
        return Pictures(light_on_dark=True, ink=None if "fashion" in source.lower() else 20)

    def torch_model(self, name: str, options: Any) -> nn.Module:
        classes = self.columns.num_classes
        if name == "linear":
            return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))
        if name == "mlp":
            return nn.Sequential(
                nn.Flatten(),
                nn.Linear(784, options.hidden),
                nn.ReLU(),
                nn.Dropout(options.dropout),
                nn.Linear(options.hidden, classes),
            )
        channels, last = options.channels, options.channels * 2
        return nn.Sequential(
            *self._convolution(1, channels, options.batch_norm),
            *self._convolution(channels, last, options.batch_norm),
            nn.Flatten(),
            nn.Linear(last * 7 * 7, options.hidden),
            nn.ReLU(),
            nn.Dropout(options.dropout),
            nn.Linear(options.hidden, classes),
        )

    def torch_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 28, 28) uint8 to (batch, 1, 28, 28) float32 in [0, 1]."""
        return super().torch_inputs(x).unsqueeze(1)

    def keras_model(self, keras: Any, name: str, options: Any) -> Any:
        layers, classes = keras.layers, self.columns.num_classes
        if name == "linear":
            return keras.Sequential([layers.Input((28, 28, 1)), layers.Flatten(), layers.Dense(classes)])
        hidden = [layers.Dense(options.hidden, activation="relu"), layers.Dropout(options.dropout), layers.Dense(classes)]
        if name == "mlp":
            return keras.Sequential([layers.Input((28, 28, 1)), layers.Flatten(), *hidden])
        convolutions = [
            layer
            for channels in (options.channels, options.channels * 2)
            for layer in self._keras_convolution(layers, channels, options.batch_norm)
        ]
        return keras.Sequential([layers.Input((28, 28, 1)), *convolutions, layers.Flatten(), *hidden])

    def keras_inputs(self, x: tf.Tensor) -> tf.Tensor:
        """(batch, 28, 28) uint8 to (batch, 28, 28, 1) float32 in [0, 1]."""
        return super().keras_inputs(x)[..., None]

    @staticmethod
    def _keras_convolution(layers: Any, channels: int, batch_norm: bool) -> list[Any]:
        # The arguments of the norm are PyTorch's defaults, so that the models are the same in both frameworks.
        norm = [layers.BatchNormalization(momentum=0.9, epsilon=1e-5)] if batch_norm else []
        return [layers.Conv2D(channels, 3, padding="same"), *norm, layers.ReLU(), layers.MaxPooling2D(2)]

    @staticmethod
    def _convolution(inputs: int, outputs: int, batch_norm: bool) -> list[nn.Module]:
        norm = [nn.BatchNorm2d(outputs)] if batch_norm else []
        return [nn.Conv2d(inputs, outputs, 3, padding=1), *norm, nn.ReLU(), nn.MaxPool2d(2)]


TASK = Mnist()
