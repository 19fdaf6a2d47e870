"""A worker process of TensorFlow: the right Keras, the same bits every time, and only the devices it may use."""

from __future__ import annotations

import os
from typing import Any

from raytrain_app.checks import INSTALL_TENSORFLOW
from raytrain_app.errors import JobError
from raytrain_app.job import Job


def prepare_process(job: Job) -> None:
    """Sets TensorFlow up before its first operation; comes before the task's module is imported, which may run some.

    Threads come from the job, not from the machine; kernels are deterministic; memory of a GPU is taken as needed, not all
    at once; a job that computes on the CPU sees no GPU.

    Raises:
        JobError: TensorFlow or Keras is missing, or Keras runs on another backend, or TensorFlow is in use already.
    """
    os.environ["KERAS_BACKEND"] = "tensorflow"
    # Ray's TensorFlow backend and many machines' profiles set it; it changes what `tf.keras` is, which nothing here uses.
    os.environ.pop("TF_USE_LEGACY_KERAS", None)
    import_keras()
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if job.scaling.uses_gpu and not gpus:
        raise JobError(
            "the job asks for a GPU, and TensorFlow sees none on this worker; install its GPU build with "
            "pip install 'tensorflow[and-cuda]', or set scaling.device: cpu"
        )
    try:
        tf.config.threading.set_intra_op_parallelism_threads(job.train.threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        if not job.scaling.uses_gpu:
            tf.config.set_visible_devices([], "GPU")
        for gpu in gpus if job.scaling.uses_gpu else ():
            tf.config.experimental.set_memory_growth(gpu, True)
        if job.train.reduction == "fast" and not job.scaling.uses_gpu:
            # tf.distribute copies a model to each device: without GPUs, a device for each CPU that the worker has.
            cpus = [tf.config.LogicalDeviceConfiguration()] * max(1, int(job.scaling.resources_per_worker["CPU"]))
            tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], cpus)
    except RuntimeError as error:
        raise JobError(f"TensorFlow was in use before the worker could set it up: {error}") from None
    if job.train.reduction == "exact":
        tf.config.experimental.enable_op_determinism()


def import_keras() -> Any:
    """Keras 3 on TensorFlow. Always `import keras`, never `tf.keras`, whose meaning depends on the environment.

    Raises:
        JobError: it is missing, too old, or on another backend.
    """
    try:
        import keras
        import tensorflow  # noqa: F401
    except ModuleNotFoundError as error:
        lacks = f"framework: tensorflow needs the package {error.name}, which this worker lacks"
        raise JobError(f"{lacks}; {INSTALL_TENSORFLOW}") from None
    if keras.backend.backend() != "tensorflow":
        raise JobError(
            f"Keras runs on {keras.backend.backend()} in this worker; expected tensorflow. "
            "Something imported Keras before raytrain set KERAS_BACKEND"
        )
    return keras


def import_tf_keras() -> Any:
    """tf_keras, the Keras that tf.distribute works with.

    Raises:
        JobError: it is missing, or of another release than TensorFlow.
    """
    import tensorflow as tf

    try:
        import tf_keras
    except ModuleNotFoundError:
        raise JobError(
            f"strategy.tf_distribute needs the package tf_keras, which this worker lacks; {INSTALL_TENSORFLOW}"
        ) from None
    wanted = tf.__version__.split(".")[:2]
    if tf_keras.__version__.split(".")[:2] != wanted:
        raise JobError(
            f"strategy.tf_distribute needs tf_keras {'.'.join(wanted)} with TensorFlow {tf.__version__}; "
            f"this worker has {tf_keras.__version__}; pip install 'tf_keras~={'.'.join(wanted)}.0'"
        )
    return tf_keras


def local_devices() -> list[str]:
    """The devices that tf.distribute may use in this process: its GPUs, or else its logical CPUs."""
    import tensorflow as tf

    return [device.name for device in tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")]


def describe(fast: bool) -> dict[str, str]:
    """What of this process may change bits: versions, and the GPU that is used.

    Args:
        fast: tf.distribute is used, and so tf_keras.
    """
    import keras
    import tensorflow as tf

    versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
    if fast:
        versions["tf_keras"] = import_tf_keras().__version__
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.get_visible_devices("GPU")]
    return {**versions, **({"gpu": str(gpus[0].get("device_name"))} if gpus else {})}
