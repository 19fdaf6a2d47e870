"""What people train Keras with today, as a script: `fit` of tf_keras under MultiWorkerMirroredStrategy, or alone with one worker.

    torchrun --nproc-per-node 2 -m raytrain_app.bench.plain_keras '{"model": "cnn", ...}'

Asked like `plain_torch`. Each worker has its shuffled batches in memory, and reads ahead.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import numpy as np
import torch.distributed as dist

from raytrain_app.bench.plain_torch import answer, join_group, steps_asked
from raytrain_app.bench.random_images import TASK


def main(config: dict[str, Any]) -> None:
    """Trains on demand.

    Args:
        config: `model`, `options`, `rows`, `batch` (of all workers together), `threads`, `lr`, `device`.
    """
    rank, world_size, _ = join_group("cpu")  # for the number of steps alone
    if world_size > 1:
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": _addresses()}, "task": {"type": "worker", "index": rank}})
    import tensorflow as tf
    import tf_keras

    tf.config.threading.set_intra_op_parallelism_threads(config["threads"])
    gpus = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[rank : rank + 1] if config["device"] == "cuda" else [], "GPU")
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if world_size > 1 else tf.distribute.get_strategy()
    x, y = TASK.generate(str(config["rows"]))["train"]
    order = np.random.default_rng(0).permutation(len(y)).reshape(-1, world_size, config["batch"] // world_size)[:, rank]

    def dataset(_: Any = None) -> Any:
        batches = tf.data.Dataset.from_tensor_slices((x[order], y[order])).repeat()
        return batches.map(lambda images, labels: (TASK.keras_inputs(images), labels)).prefetch(tf.data.AUTOTUNE)

    with strategy.scope():
        model = TASK.keras_model(tf_keras, config["model"], TASK.models[config["model"]](**config["options"]))
        model.compile(tf_keras.optimizers.Adam(config["lr"]), TASK.keras_loss(tf_keras), metrics=["accuracy"])
    batches = strategy.distribute_datasets_from_function(dataset) if world_size > 1 else dataset()

    class Clock(tf_keras.callbacks.Callback):  # type: ignore[misc]
        """Times from the end of the first step to that of the last: starting `fit` does not count."""

        _supports_tf_logs = True  # nothing is fetched for it

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.last_s = time.perf_counter()
            if batch == 0:
                self.first_s = self.last_s

    clock = Clock()
    while (count := steps_asked(rank, world_size)) > 0:
        model.fit(batches, steps_per_epoch=count + 1, verbose=0, callbacks=[clock])
        if rank == 0:
            answer({"step": (clock.last_s - clock.first_s) / count})


def _addresses() -> list[str]:
    """A free port of each worker, for TensorFlow."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        addresses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(addresses, f"127.0.0.1:{free.getsockname()[1]}")
    return addresses


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
