"""The PyTorch learner: a module, its optimizer, and one flat vector for all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_app.elastic.exchange import PeerLost, broadcast, collective
from raytrain_app.elastic.plan import shard_seed
from raytrain_app.elastic.reduce import NUM_SCORES, Layout, Ready, Shard
from raytrain_app.job import Job
from raytrain_app.learners.buckets import BucketExchange
from raytrain_app.learners.callbacks import Callbacks
from raytrain_app.learners.gradients import GradientWatch
from raytrain_app.learners.graphs import Graphs
from raytrain_app.learners.torch_parts import check_slots, flat_dtype, make_optimizer, on_host, places, seed_generators
from raytrain_app.state import Arrays, TrainState, check_names
from raytrain_app.task import Task

Forward = Callable[[torch.Tensor], torch.Tensor]


class TorchLearner:
    """See `learners.base.Learner`.

    Parameters are views of one flat vector and their gradients views of another: the optimizer updates one tensor, and a
    shard's gradient needs no gathering. Float buffers follow the gradients in the flat vector.
    """

    def __init__(self, job: Job, task: Task, device: torch.device) -> None:
        """Builds the model from the job's seed alone, so that all replicas start equal."""
        self.device = device
        self.callbacks, self.own_file = Callbacks(), None
        self._task = task
        self._clip_norm = job.train.clip_norm
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=job.train.precision == "bf16")
        seed_generators(shard_seed([job.train.seed]), device)
        self.model = task.torch_model(job.model.name, task.models[job.model.name](**job.model.options)).to(device)
        self._parameters = dict(self.model.named_parameters())
        self._named = {name: p for name, p in self._parameters.items() if p.requires_grad}
        buffers = list(_find_buffers(self.model))
        self._buffers = [buffer for buffer in buffers if buffer.value.is_floating_point()]
        self._counters = [buffer for buffer in buffers if _is_integer(buffer.value)]
        dtype = flat_dtype(self._parameters.values(), [buffer.value for buffer in self._buffers])
        self._places, num_parameters = places({name: p.shape for name, p in self._named.items()})
        num_buffers = sum(buffer.value.numel() for buffer in self._buffers)
        num_counters = sum(buffer.value.numel() for buffer in self._counters)
        self.layout = Layout(num_parameters, num_buffers, num_counters, dtype)
        self._flat = torch.zeros(self.layout.size, dtype=dtype, device=device)
        self._weights = nn.Parameter(torch.zeros(num_parameters, dtype=dtype, device=device))
        for name, parameter in self._named.items():
            view = self._weights.detach()[self._places[name]].view_as(parameter)
            parameter.data = view.copy_(parameter.data)
            parameter.grad = self._flat[self._places[name]].view_as(parameter)
        self._optimizer = make_optimizer(job, [self._weights])
        self._training: bool | None = None
        self._zero_counters = torch.zeros(num_counters, dtype=torch.int64, device=device)
        self._nothing = self._zero_counters[:0]
        self._start = self._read(self._buffers), self._read(self._counters)
        self._ddp: DistributedDataParallel | None = None
        self._watch: GradientWatch | None = None
        self._graphs: Graphs | None = None
        if job.train.cuda_graphs and device.type == "cuda":
            self._graphs = Graphs(self._compute, self._flat, lambda: [buffer.value for buffer in buffers])

    # ---- training ----

    def shard(self, x: np.ndarray, y: np.ndarray, seed: int, ready: Ready | None = None) -> Shard:
        if len(y) == 0:
            self._flat.zero_()
            return Shard(self._flat, self._zero_counters, torch.zeros(NUM_SCORES, dtype=torch.float64, device=self.device))
        rows, labels = self._rows(x, y)
        try:
            if self._graphs is not None:
                scores, counters = self._graphs(rows, labels, partial(seed_generators, seed, self.device))
            else:
                seed_generators(seed, self.device)
                scores, counters = self._compute(rows, labels, ready)
            return Shard(self._flat, counters, scores)
        finally:
            self._reset_buffers()  # a step that comes to nothing leaves no trace

    def _compute(self, rows: torch.Tensor, labels: torch.Tensor, ready: Ready | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Leaves a shard's gradient and float buffers in the flat vector; returns the scores and the integer buffers."""
        self._flat.zero_()
        self._reset_buffers()
        loss, scores = self._forward(self.model, rows, labels)
        if ready is None:
            loss.backward()
        else:
            self._watch = self._watch or GradientWatch(self._named, self._places)
            self._watch.backward(loss, partial(ready, self._flat))
        if self._buffers:
            self._flat[self.layout.num_parameters :] = self._read(self._buffers)
        return scores, self._read(self._counters)

    def apply(self, mean: torch.Tensor, counters: torch.Tensor, lr: float) -> None:
        self._weights.grad = mean[: self.layout.num_parameters]
        self._start_from(mean[self.layout.num_parameters :], counters)
        self._update(lr)

    def connect(self, world_size: int, num_flags: int) -> None:
        self._world_size, self._ddp = world_size, None
        if world_size > 1:
            unused = self._has_unused()
            self._telling = _Telling(self.model, NUM_SCORES + num_flags, self._flat)
            with collective():  # all have the same parameters already
                self._ddp = DistributedDataParallel(
                    self._telling, find_unused_parameters=unused, init_sync=False, forward_sync_buffers=False
                )
            if self.device.type == "cpu":
                exchange = BucketExchange(dist.get_rank(), world_size, self.layout.dtype)
                self._ddp.register_comm_hook(None, exchange.reduce)

    def fast_shard(self, x: np.ndarray, y: np.ndarray, seed: int, num_rows: int, flags: Sequence[float]) -> list[float]:
        self._flat.zero_()
        seed_generators(seed, self.device)
        if self._world_size == 1:
            loss, scores = self._forward(self.model, *self._rows(x, y))
            loss.backward(loss.new_tensor(1 / num_rows))
            return [*scores.tolist(), *flags]
        try:
            return self._distributed_shard(x, y, num_rows, flags)
        except PeerLost:
            self._disconnect()
            self._reset_buffers()
            raise
        except RuntimeError as error:
            self._disconnect()
            # The task's code and the collectives raise the same error: a step that fails without the group is the task's.
            self.shard(x, y, seed)
            raise PeerLost(str(error)) from error

    def _disconnect(self) -> None:
        """Lets go of DistributedDataParallel in the middle of a step."""
        assert self._ddp is not None, "it has just been used"
        self._ddp._remove_autograd_hooks()  # the error keeps it, and it would go on counting gradients
        self._ddp = None

    def _distributed_shard(self, x: np.ndarray, y: np.ndarray, num_rows: int, flags: Sequence[float]) -> list[float]:
        ddp, telling = self._ddp, self._telling
        assert ddp is not None, "connect comes first"
        self.share_buffers()  # which DistributedDataParallel does too, by a collective
        told: list[torch.Tensor] = []

        def model(inputs: torch.Tensor) -> torch.Tensor:
            outputs, place = cast(tuple[torch.Tensor, torch.Tensor], ddp(inputs))
            told.append(place)
            return outputs

        loss, scores = self._forward(model, *self._rows(x, y))
        # DistributedDataParallel averages over the workers; the factors make that the mean over the global batch's rows, and
        # sums of what is told.
        numbers = torch.cat([scores, scores.new_tensor(flags)]).to(telling.told.dtype) * self._world_size
        telling.told.grad = None
        torch.autograd.backward((loss, told[0]), (loss.new_tensor(self._world_size / num_rows), numbers))
        assert telling.told.grad is not None
        sums: list[float] = telling.told.grad.tolist()
        return sums

    def fast_apply(self, lr: float) -> None:
        self._start_from(self._read(self._buffers), self._read(self._counters))
        self._weights.grad = self._flat[: self.layout.num_parameters]
        self._update(lr)

    def share_buffers(self) -> None:
        if self._world_size > 1 and (self._buffers or self._counters):
            counters, values = self._read(self._counters).cpu(), self._read(self._buffers).cpu()
            packed = torch.cat([counters.view(torch.uint8), values.view(torch.uint8)])
            broadcast(packed, 0)
            self._write(self._counters, packed[: counters.nbytes].view(counters.dtype))
            self._write(self._buffers, packed[counters.nbytes :].view(values.dtype))

    def _forward(self, model: Forward, rows: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses, to go backward from, and the scores."""
        self._set_mode(training=True)
        inputs, targets = self._task.torch_inputs(rows), self._task.torch_targets(rows, labels)
        with self._autocast:
            outputs = model(self._task.torch_augment(inputs))
            loss = self._task.torch_loss(outputs, targets)
        with torch.no_grad():
            scores = torch.stack([loss.double(), self._task.torch_correct(outputs, targets).double()])
        return loss, scores

    def _update(self, lr: float) -> None:
        if self._clip_norm is not None:
            gradient = self._weights.grad
            assert gradient is not None
            norm = torch.linalg.vector_norm(gradient)
            self._weights.grad = gradient * torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    # ---- evaluation ----

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
        self._set_mode(training=False)
        rows, labels = self._rows(x, y)
        inputs, targets = self._task.torch_inputs(rows), self._task.torch_targets(rows, labels)
        with torch.inference_mode(), self._autocast:
            outputs = self.model(inputs)
            loss = self._task.torch_loss(outputs, targets)
            return torch.stack([loss.double(), self._task.torch_correct(outputs, targets).double()])

    def outputs(self, x: np.ndarray) -> np.ndarray:
        self._set_mode(training=False)
        with torch.inference_mode(), self._autocast:
            outputs = self.model(self._task.torch_inputs(torch.tensor(x, device=self.device)))
            return np.asarray(outputs.float().cpu().numpy())

    def _set_mode(self, *, training: bool) -> None:
        """Puts all modules in training or evaluation mode, which takes its time: only when it changes."""
        if self._training is not training:
            self.model.train(training)
            self._training = training

    def _rows(self, x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and labels on the device; they travel as stored (uint8) and are scaled there.

        Always a copy: kernels round differently for memory that is aligned differently, and where a shard lies among its
        worker's rows depends on the number of workers.
        """
        return torch.tensor(x, device=self.device), torch.tensor(y, device=self.device)

    def metrics(self, extra: Sequence[float]) -> dict[str, float]:
        return {}

    # ---- state ----

    def state(self) -> TrainState:
        optimizer: Arrays = {}
        for slot, value in self._optimizer.state[self._weights].items():
            if value.numel() == self._weights.numel():
                for name, place in self._places.items():
                    optimizer[f"{slot}.{name}"] = on_host(value[place].view_as(self._named[name]))
            else:
                optimizer[slot] = on_host(value)
        buffers = {buffer.name: on_host(buffer.value) for buffer in (*self._buffers, *self._counters)}
        return TrainState(self.weights(), buffers, optimizer)

    def load(self, state: TrainState) -> None:
        check_names("weights", {n: tuple(p.shape) for n, p in self._parameters.items()}, state.weights)
        buffers = (*self._buffers, *self._counters)
        check_names("buffers", {buffer.name: tuple(buffer.value.shape) for buffer in buffers}, state.buffers)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(torch.from_numpy(state.weights[name].copy()))
            for buffer in buffers:
                buffer.value.copy_(torch.from_numpy(state.buffers[buffer.name].copy()))
        self._start_from(self._read(self._buffers), self._read(self._counters))
        self._load_slots(state.optimizer)

    def _load_slots(self, saved: Arrays) -> None:
        """Rebuilds the flat optimizer slots from the named ones; there are none before the first step."""
        expected = {name: tuple(self._named[name].shape) for name in self._places}
        slots: dict[str, torch.Tensor] = {}
        for slot in dict.fromkeys(key.partition(".")[0] for key in saved):
            if slot in saved:
                slots[slot] = torch.from_numpy(saved[slot].copy()).to(self.device)
                continue
            named = {key.removeprefix(f"{slot}."): array for key, array in saved.items() if key.startswith(f"{slot}.")}
            check_names("optimizer state", expected, named)
            slots[slot] = torch.zeros_like(self._weights.detach())
            for name, array in named.items():
                slots[slot][self._places[name]] = torch.from_numpy(array.copy()).view(-1).to(self.device)
        check_slots(slots, self._optimizer)
        self._optimizer.state.clear()
        if slots:
            self._optimizer.state[self._weights] = slots

    def weights(self) -> Arrays:
        return {name: on_host(parameter) for name, parameter in self._parameters.items()}

    def export(self) -> bytes:
        raise NotImplementedError("own_file is None")

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        vector = torch.cat([self._weights.detach(), self._read(self._buffers).to(self.layout.dtype)])
        return vector.cpu(), self._read(self._counters).cpu()

    def load_flat(self, vector: torch.Tensor, counters: torch.Tensor) -> None:
        with torch.no_grad():
            self._weights.copy_(vector[: self.layout.num_parameters])
            self._start_from(vector[self.layout.num_parameters :], counters)

    # ---- buffers ----

    def _start_from(self, buffers: torch.Tensor, counters: torch.Tensor) -> None:
        """Takes over float buffers and counters as those from which the next shards start."""
        if self._buffers or self._counters:
            self._start[0].copy_(buffers)
            self._start[1].copy_(counters)
            self._reset_buffers()

    def _reset_buffers(self) -> None:
        """Gives the model the buffers from which the shards of the step start."""
        if self._buffers or self._counters:
            self._write(self._buffers, self._start[0])
            self._write(self._counters, self._start[1])

    def _read(self, buffers: Sequence[_Buffer]) -> torch.Tensor:
        if not buffers:
            return self._nothing
        return torch.cat([buffer.value.reshape(-1) for buffer in buffers])

    def _write(self, buffers: Sequence[_Buffer], values: torch.Tensor) -> None:
        for buffer, part in zip(buffers, values.split([buffer.value.numel() for buffer in buffers]), strict=True):
            buffer.value.copy_(part.view_as(buffer.value))

    def _has_unused(self) -> bool:
        """Whether some parameter gets no gradient, which DistributedDataParallel must be told before it starts."""
        shape, dtype = self._task.columns.shape, np.dtype(self._task.columns.dtype)
        before = self.state()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            for parameter in self._named.values():
                parameter.grad = None
            self._forward(self.model, *self._rows(np.zeros((2, *shape), dtype), np.zeros(2, np.int64)))[0].backward()
        unused = any(parameter.grad is None for parameter in self._named.values())
        for name, parameter in self._named.items():
            parameter.grad = self._flat[self._places[name]].view_as(parameter)
        self.load(before)
        return unused


class _Telling(nn.Module):
    """A model with one parameter more, whose gradient carries numbers in the message that the other gradients go in.

    A message of their own, however short, costs two workers on two cores about as much as that of the gradients.
    """

    def __init__(self, model: nn.Module, count: int, like: torch.Tensor) -> None:
        super().__init__()
        self.model = model
        self.told = nn.Parameter(like.new_zeros(count))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The parameter is given as a result, since DistributedDataParallel looks there for those that are used.
        return self.model(inputs), self.told.clone()


@dataclass(frozen=True)
class _Buffer:
    """A buffer of a module, looked up each time, since the module may replace it."""

    name: str
    module: nn.Module
    key: str

    @property
    def value(self) -> torch.Tensor:
        return cast(torch.Tensor, self.module._buffers[self.key])


def _find_buffers(model: nn.Module) -> Iterator[_Buffer]:
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield _Buffer(f"{prefix}.{key}" if prefix else key, module, key)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
