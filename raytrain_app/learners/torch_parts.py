"""What the learners of whole and of cut PyTorch models share: generators, places in flat vectors, optimizers."""

from __future__ import annotations

import functools
import inspect
import os
import random
import sys
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import nn

from raytrain_app.errors import JobError, StorageError
from raytrain_app.job import Job

ALIGNMENT = 16
"""Elements to which each parameter's place in the flat vectors is rounded up, so that kernels see aligned memory."""

SLOTS: dict[type[torch.optim.Optimizer], set[str]] = {
    torch.optim.SGD: {"momentum_buffer"},
    torch.optim.Adam: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
}
"""Names of each optimizer's state after its first step."""


def prepare_process(job: Job) -> None:
    """Sets torch to compute the same bits every time: deterministic kernels, and threads from the job, not the machine."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(job.train.threads)
    # What torch.use_deterministic_algorithms does, which takes a second to load the compiler in order to set it as well.
    torch.set_deterministic_debug_mode("error")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    torch.backends.cudnn.benchmark = False


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds torch, numpy and Python, which a task may use for dropout and augmentation."""
    # Not torch.manual_seed, which where there is no GPU keeps a traceback for later: more work than a small model's forward.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - a task may use it, knowingly or not
    random.seed(seed)


def on_host(tensor: torch.Tensor) -> np.ndarray:
    """A copy on the host."""
    return tensor.detach().cpu().numpy().copy()


def flat_dtype(parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in parameters}
    if not dtypes:
        raise JobError("model: it has no parameters, so there is nothing to train")
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise JobError(
            f"model: its parameters have dtype {', '.join(sorted(map(str, dtypes)))}; expected float32 or float64 for all. "
            "Keep the model in float32 and use train.precision: bf16 to compute in bfloat16"
        )
    dtype = dtypes.pop()
    odd = [str(buffer.dtype) for buffer in buffers if buffer.dtype != dtype]
    if odd:
        raise JobError(f"model: a buffer has dtype {odd[0]}; expected {dtype}, as the parameters have")
    return dtype


def places(shapes: Mapping[str, torch.Size]) -> tuple[dict[str, slice], int]:
    """Each parameter's slice of the flat vector, and the vector's length."""
    found, start = {}, 0
    for name, shape in shapes.items():
        found[name] = slice(start, start + shape.numel())
        start += -(-shape.numel() // ALIGNMENT) * ALIGNMENT
    return found, start


def make_optimizer(job: Job, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The job's optimizer. Adam goes over the parameters once: a fraction of the time of one kernel after the other.

    All work element by element. It does not matter how parameters are cut or joined, if cuts are multiples of `ALIGNMENT`:
    kernels round the elements that are left over after whole vector registers in another way.
    """
    parameters = list(parameters)
    options = job.optimizer.model_dump(exclude={"name", "schedule", "warmup_steps"})
    # Fused kernels take memory as it lies, and gradients are contiguous.
    if job.optimizer.name != "sgd" and all(parameter.is_contiguous() for parameter in parameters):
        options["fused"] = True
    kinds: dict[str, type[torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    _spare_the_compiler()
    optimizer = kinds[job.optimizer.name](parameters, **options)
    bare_step = functools.partial(inspect.unwrap(type(optimizer).step), optimizer)
    optimizer.step = torch.no_grad()(bare_step)  # type: ignore[method-assign]
    return optimizer


def _spare_the_compiler() -> None:
    """Keeps optimizers from loading torch's compiler, which takes each worker a second when it starts.

    They load it to say that some of their methods are not to be compiled; nothing of an optimizer is compiled here. Where
    another torch goes about it in another way, the compiler is loaded as ever.
    """
    if "torch._dynamo" not in sys.modules:
        for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
            method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
            vars(method).setdefault("__dynamo_disable", method)


def check_slots(slots: Iterable[str], optimizer: torch.optim.Optimizer) -> None:
    """Refuses saved optimizer state that is another optimizer's; there is none before the first step.

    Raises:
        StorageError: the names of the slots are others.
    """
    found = set(slots)
    if found and found != SLOTS[type(optimizer)]:
        raise StorageError(
            f"the saved optimizer state ({', '.join(sorted(found))}) is of another optimizer; resume with the job that wrote it"
        )
