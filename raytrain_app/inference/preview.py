"""What TensorBoard shows beside the curves: example rows as images, and the model's graph."""

from __future__ import annotations

import copy
import io
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from raytrain_app.data.one_split import read_split
from raytrain_app.inference.trained import Trained
from raytrain_app.storage.folder import Folder

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

FILE = "tensorboard/events.out.tfevents.0000000000.preview"
"""Its name sorts before those of the run's own files."""
EXAMPLES, COLUMNS, SCALE = 40, 10, 2
"""Rows shown, how many side by side, and the size of a pixel."""


def write_preview(trained: Trained, folder: Folder) -> str:
    """Writes the file of example images and graph into a run directory.

    Returns:
        Why there is no graph; empty where there is one.

    Raises:
        DataError: the training rows cannot be read.
        StorageError: the file cannot be written.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    without = ""
    file = io.BytesIO()
    writer = RecordWriter(file)
    events = [Event(wall_time=time.time(), file_version="brain.Event:2")]
    try:
        graph = _keras_graph(trained) if trained.job.framework == "tensorflow" else _torch_graph(trained)
        events.append(Event(wall_time=time.time(), graph_def=graph))
    except Exception as error:  # tracing runs the task's own code, which may raise anything; the images can do without it
        without = f"the model cannot be traced ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    x, _ = read_split(trained.job, trained.task, "train")
    if (picture := _grid(x[:EXAMPLES])) is not None:
        events.append(_image_event("training rows", picture))
    for event in events:
        writer.write(event.SerializeToString())
    writer.flush()
    folder.write(FILE, file.getvalue())
    return without


def _torch_graph(trained: Trained) -> bytes:
    import torch
    from torch.utils.tensorboard._pytorch_graph import graph  # the public writer would open a file of its own

    columns = trained.task.columns
    learner: Any = trained.learner
    inputs = trained.task.torch_inputs(torch.zeros((1, *columns.shape), dtype=getattr(torch, columns.dtype)))
    definition, _ = graph(copy.deepcopy(learner.model).cpu().eval(), inputs)
    return bytes(definition.SerializeToString())


def _keras_graph(trained: Trained) -> bytes:
    """The operations under the names of their layers, for any model: Keras's own description leaves out subclassed ones."""
    import tensorflow as tf

    columns = trained.task.columns
    learner: Any = trained.learner
    forward = tf.function(lambda x: learner.model(trained.task.keras_inputs(x), training=False))
    traced = forward.get_concrete_function(tf.TensorSpec((None, *columns.shape), columns.dtype, name="x"))
    return bytes(traced.graph.as_graph_def().SerializeToString())


def _image_event(tag: str, picture: np.ndarray) -> Event:
    from PIL import Image
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    channels = 1 if picture.ndim == 2 else 3
    image = Summary.Image(
        height=picture.shape[0], width=picture.shape[1], colorspace=channels, encoded_image_string=file.getvalue()
    )
    return Event(wall_time=time.time(), step=0, summary=Summary(value=[Summary.Value(tag=tag, image=image)]))


def _grid(x: np.ndarray) -> np.ndarray | None:
    """Rows side by side as one uint8 picture, None where they are no images."""
    if x.ndim == 4 and x.shape[3] == 1:
        x = x[..., 0]
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] != 3):
        return None
    lines = -(-len(x) // COLUMNS)
    tiles = np.zeros((lines * COLUMNS, *x.shape[1:]), np.uint8)
    tiles[: len(x)] = x
    tiles = np.pad(tiles, ((0, 0), (1, 1), (1, 1), *[(0, 0)] * (x.ndim - 3)), constant_values=64)
    rows = [np.concatenate(list(tiles[i * COLUMNS : (i + 1) * COLUMNS]), axis=1) for i in range(lines)]
    return np.concatenate(rows).repeat(SCALE, axis=0).repeat(SCALE, axis=1)
