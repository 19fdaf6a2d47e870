"""The PyTorch learner: a module, its optimizer, and one flat vector for all gradients."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_app.elastic.plan import shard_seed
from raytrain_app.elastic.reduce import NUM_SCORES, Layout, Shard
from raytrain_app.errors import JobError, StorageError
from raytrain_app.job import Job
from raytrain_app.state import Arrays, TrainState
from raytrain_app.task import Task

ALIGNMENT = 16
"""Elements to which each parameter's place in the flat vectors is rounded up, so that kernels see aligned memory."""


def prepare_process(job: Job) -> None:
    """Sets torch to compute the same bits every time: deterministic kernels, and threads from the job, not the machine."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(job.train.threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def seed_generators(seed: int) -> None:
    """Seeds torch (all devices), numpy and Python, which a task may use for dropout and augmentation."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


class TorchLearner:
    """See `learners.base.Learner`.

    Parameters are views of one flat vector and their gradients views of another: the optimizer updates one tensor, and a
    shard's gradient needs no gathering. Float buffers follow the gradients in the flat vector.
    """

    def __init__(self, job: Job, task: Task, device: torch.device) -> None:
        """Builds the model from the job's seed alone, so that all replicas start equal."""
        self.device = device
        self._task = task
        self._clip_norm = job.train.clip_norm
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=job.train.precision == "bf16")
        seed_generators(shard_seed([job.train.seed]))
        self.model = task.torch_model(job.model.name, task.models[job.model.name](**job.model.options)).to(device)
        self._named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._buffers = [(name, module, key) for name, module, key in _buffers(self.model) if module._buffers[key].is_floating_point()]
        self._counters = [(name, module, key) for name, module, key in _buffers(self.model) if _is_integer(module._buffers[key])]
        dtype = _flat_dtype([*self._named.values(), *(m._buffers[k] for _, m, k in self._buffers)])
        self._places, num_parameters = _places({name: p.shape for name, p in self._named.items()})
        num_buffers = sum(module._buffers[key].numel() for _, module, key in self._buffers)
        num_counters = sum(module._buffers[key].numel() for _, module, key in self._counters)
        self.layout = Layout(num_parameters, num_buffers, num_counters, dtype)
        self._flat = torch.zeros(self.layout.size, dtype=dtype, device=device)
        self._weights = nn.Parameter(torch.zeros(num_parameters, dtype=dtype, device=device))
        self._weights.grad = self._flat[:num_parameters]
        for name, parameter in self._named.items():
            view = self._weights.detach()[self._places[name]].view_as(parameter)
            parameter.data = view.copy_(parameter.data)
            parameter.grad = self._flat[self._places[name]].view_as(parameter)
        self._optimizer = _optimizer(job, self._weights)
        self._zero_counters = torch.zeros(num_counters, dtype=torch.int64, device=device)
        self._start = self._read(self._buffers), self._read(self._counters)
        self._ddp: nn.Module | None = None

    # ---- training ----

    def shard(self, x: np.ndarray, y: np.ndarray, seed: int) -> Shard:
        self._flat.zero_()
        if len(y) == 0:
            return Shard(self._flat, self._zero_counters, torch.zeros(NUM_SCORES, dtype=torch.float64, device=self.device))
        if self._buffers or self._counters:
            self._write(self._buffers, self._start[0])
            self._write(self._counters, self._start[1])
        seed_generators(seed)
        scores = self._backward(self.model, x, y, 1.0)
        if self._buffers:
            self._flat[self.layout.num_parameters :] = self._read(self._buffers)
        return Shard(self._flat, self._read(self._counters), scores)

    def apply(self, mean: torch.Tensor, counters: torch.Tensor, lr: float) -> None:
        self._flat.copy_(mean)
        if self._buffers or self._counters:
            self._start = mean[self.layout.num_parameters :].clone(), counters.to(self.device)
            self._write(self._buffers, self._start[0])
            self._write(self._counters, self._start[1])
        self._update(lr)

    def connect(self, world_size: int) -> None:
        self._ddp = DistributedDataParallel(self.model, find_unused_parameters=self._has_unused()) if world_size > 1 else self.model
        self._world_size = world_size

    def fast_shard(self, x: np.ndarray, y: np.ndarray, seed: int, num_rows: int) -> torch.Tensor:
        assert self._ddp is not None, "connect comes first"
        self._flat.zero_()
        seed_generators(seed)
        # DistributedDataParallel averages over the workers; the factor makes that the mean over the global batch's rows.
        return self._backward(self._ddp, x, y, self._world_size / num_rows)

    def fast_apply(self, lr: float) -> None:
        self._update(lr)

    def _backward(self, model: nn.Module, x: np.ndarray, y: np.ndarray, factor: float) -> torch.Tensor:
        """Adds the gradient of factor * (sum of the losses) to the flat vector; returns the scores."""
        model.train()
        inputs, labels = self._batch(x, y)
        with self._autocast:
            outputs = model(self._task.torch_augment(inputs))
            loss = self._task.torch_loss(outputs, labels)
        (loss * factor if factor != 1.0 else loss).backward()
        with torch.no_grad():
            return torch.stack([loss.double(), self._task.torch_correct(outputs, labels).double()])

    def _update(self, lr: float) -> None:
        if self._clip_norm is not None:
            gradient = self._flat[: self.layout.num_parameters]
            norm = torch.linalg.vector_norm(gradient)
            gradient.mul_(torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    # ---- evaluation ----

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
        self.model.eval()
        inputs, labels = self._batch(x, y)
        with torch.inference_mode(), self._autocast:
            outputs = self.model(inputs)
            loss = self._task.torch_loss(outputs, labels)
            return torch.stack([loss.double(), self._task.torch_correct(outputs, labels).double()])

    def _batch(self, x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows on the device; they travel as stored (uint8) and are scaled there."""
        inputs = torch.from_numpy(x).to(self.device, non_blocking=True)
        return self._task.torch_inputs(inputs), torch.from_numpy(y).to(self.device, non_blocking=True)

    # ---- state ----

    def state(self) -> TrainState:
        slots = self._optimizer.state[self._weights]
        optimizer = {
            f"{slot}.{name}": value[place].view(self._named[name].shape).cpu().numpy().copy()
            for slot, value in slots.items()
            if value.numel() == self._weights.numel()
            for name, place in self._places.items()
        }
        optimizer.update({slot: value.cpu().numpy().copy() for slot, value in slots.items() if value.numel() != self._weights.numel()})
        buffers = {name: m._buffers[k].detach().cpu().numpy().copy() for name, m, k in (*self._buffers, *self._counters)}
        return TrainState(self.weights(), buffers, optimizer)

    def load(self, state: TrainState) -> None:
        _check_names("weights", {n: tuple(p.shape) for n, p in self._named.items()}, state.weights)
        buffers = (*self._buffers, *self._counters)
        _check_names("buffers", {n: tuple(m._buffers[k].shape) for n, m, k in buffers}, state.buffers)
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(torch.from_numpy(state.weights[name].copy()))
            for name, module, key in buffers:
                module._buffers[key].copy_(torch.from_numpy(state.buffers[name].copy()))
        self._start = self._read(self._buffers), self._read(self._counters)
        self._load_slots(state.optimizer)

    def _load_slots(self, saved: Arrays) -> None:
        """Rebuilds the flat optimizer slots from the named ones."""
        slots: dict[str, torch.Tensor] = {}
        for key, value in saved.items():
            slot, _, name = key.partition(".")
            tensor = torch.from_numpy(value.copy())
            if name:
                slots.setdefault(slot, torch.zeros_like(self._weights.detach()))[self._places[name]] = tensor.view(-1).to(self.device)
            else:
                slots[slot] = tensor
        self._optimizer.state.clear()
        if slots:
            self._optimizer.state[self._weights] = slots

    def weights(self) -> Arrays:
        return {name: p.detach().cpu().numpy().copy() for name, p in self._named.items()}

    # ---- buffers ----

    def _read(self, buffers: Sequence[tuple[str, nn.Module, str]]) -> torch.Tensor:
        if not buffers:
            return self._zero_counters[:0]
        return torch.cat([module._buffers[key].reshape(-1) for _, module, key in buffers])

    def _write(self, buffers: Sequence[tuple[str, nn.Module, str]], values: torch.Tensor) -> None:
        start = 0
        for _, module, key in buffers:
            buffer = module._buffers[key]
            buffer.copy_(values[start : start + buffer.numel()].view_as(buffer))
            start += buffer.numel()

    def _has_unused(self) -> bool:
        """Whether some parameter gets no gradient, which DistributedDataParallel must be told before it starts."""
        shape, dtype = self._task.columns.shape, np.dtype(self._task.columns.dtype)
        before = self.state()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            for parameter in self._named.values():
                parameter.grad = None
            self._backward(self.model, np.zeros((2, *shape), dtype), np.zeros(2, np.int64), 1.0)
        unused = any(parameter.grad is None for parameter in self._named.values())
        for name, parameter in self._named.items():
            parameter.grad = self._flat[self._places[name]].view_as(parameter)
        self.load(before)
        return unused


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """All buffers as (full name, module, key): looked up in the module each time, since a module may replace them."""
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield (f"{prefix}.{key}" if prefix else key), module, key


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.dtype != torch.bool


def _flat_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.float64):
            raise JobError(
                f"model: a parameter or buffer has dtype {tensor.dtype}; expected float32 or float64. "
                "Keep the model in float32 and use train.precision: bf16 to compute in bfloat16"
            )
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _places(shapes: dict[str, torch.Size]) -> tuple[dict[str, slice], int]:
    """Each parameter's slice of the flat vector, and the vector's length."""
    places, start = {}, 0
    for name, shape in shapes.items():
        places[name] = slice(start, start + shape.numel())
        start += -(-shape.numel() // ALIGNMENT) * ALIGNMENT
    return places, start


def _optimizer(job: Job, weights: nn.Parameter) -> torch.optim.Optimizer:
    """The job's optimizer on one flat parameter; all of them work element by element."""
    options = job.optimizer.model_dump(exclude={"name", "schedule", "warmup_steps"})
    kinds: dict[str, type[torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return kinds[job.optimizer.name]([weights], **options)


def _check_names(what: str, expected: dict[str, tuple[int, ...]], found: Arrays) -> None:
    if {name: array.shape for name, array in found.items()} != expected:
        odd = sorted(set(expected) ^ set(found)) or [n for n in expected if found[n].shape != expected[n]]
        raise StorageError(f"the saved {what} do not fit the model: {', '.join(odd[:3])}; resume with the job that wrote them")
