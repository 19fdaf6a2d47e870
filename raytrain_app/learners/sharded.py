"""The PyTorch learner of a replica that is spread over several workers: each has one part of it.

The parts are cut anew for every generation (`connect`), since process groups end with a generation; their values stay.
What a part's `shard` returns are the gradients of its own parameters, summed over the rows of the shard, and the scores that
this worker has seen; the sum over the workers of the replica is that of the shard.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from raytrain_app.elastic.exchange import broadcast_bytes, collective
from raytrain_app.elastic.group import peers_needed
from raytrain_app.elastic.plan import shard_rows, shard_seed
from raytrain_app.elastic.reduce import NUM_SCORES, Layout, Ready, Shard
from raytrain_app.job import Job, ModelParallel
from raytrain_app.learners.callbacks import Callbacks
from raytrain_app.learners.costs import stage_plan
from raytrain_app.learners.cutting import cut_model
from raytrain_app.learners.torch_parts import check_slots, flat_dtype, make_optimizer, on_host, places, seed_generators
from raytrain_app.state import Arrays, TrainState, check_names
from raytrain_app.storage.parts import join_parts, pack_part
from raytrain_app.task import Task

if TYPE_CHECKING:
    from raytrain_app.learners.pipeline import Pipeline


class ShardedLearner:
    """See `learners.base.Part`. `connect` comes before all else; workers of a replica make the same calls.

    Attributes:
        gradient_norm: of the whole replica's mean gradient, which the strategy adds up before `apply` where it is clipped.
    """

    def __init__(self, job: Job, task: Task, device: torch.device) -> None:
        self.device, self.layout = device, Layout()
        self.callbacks, self.own_file = Callbacks(), None
        self.gradient_norm = 0.0
        self._job, self._task, self._ways = job, task, cast(ModelParallel, job.strategy)
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=job.train.precision == "bf16")
        self._plan = stage_plan(job, task)
        self._parameters: dict[str, nn.Parameter] = {}
        # Strided parts take two gathers to join, of which DTensor warns each time; nothing but checkpoints does it.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

    def connect(self, mesh: DeviceMesh, mates: dist.ProcessGroup, keep: bool = True) -> None:
        """Cuts the model for the workers of a new generation.

        Args:
            mesh: with the dimensions "replica", "pipeline", "fsdp" and "tensor".
            mates: the workers of the replica.
            keep: the values that this worker had before stay; else all is as at the beginning.
        """
        before = self.state() if self._parameters and keep else None
        self._mesh, self._mates = mesh, mates
        options = self._task.models[self._job.model.name](**self._job.model.options)
        seed_generators(shard_seed([self._job.train.seed]), self.device)
        whole = self._task.torch_model(self._job.model.name, options).to(self.device)
        cut = self._task.torch_cut(self._job.model.name, options)
        with collective():
            self._stages = cut_model(whole, cut, self._ways, self._plan, mesh)
        self._cut = {name: p for name, p in whole.named_parameters() if p.requires_grad}
        # The optimizer steps on what is here of each parameter: plain tensors in the same memory.
        self._parameters = {name: nn.Parameter(_local(p)) for name, p in self._cut.items()}
        self._places, size = places({name: p.shape for name, p in self._parameters.items()})
        self._flat = torch.zeros(size, dtype=flat_dtype(self._cut.values(), ()), device=self.device)
        self.layout = Layout(size, dtype=self._flat.dtype)
        self._optimizer = make_optimizer(self._job, self._parameters.values())
        self._no_counters = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._pipeline = self._make_pipeline() if self._ways.pipeline > 1 else None
        if before is not None:
            self.load(before)

    def _make_pipeline(self) -> Pipeline:
        # Here, since it loads torch's compiler, which takes a second.
        from raytrain_app.learners.pipeline import Pipeline

        return Pipeline(self._stages, self._ways, self._mesh, self.device)

    # ---- training ----

    def shard(self, x: np.ndarray, y: np.ndarray, seed: int, ready: Ready | None = None) -> Shard:
        self._flat.zero_()
        scores = torch.zeros(NUM_SCORES, dtype=torch.float64, device=self.device)
        if len(y) > 0:
            # Workers that hold parts of the same tensors draw the same numbers, those with other rows draw others.
            seed_generators(seed + self._mesh.get_local_rank("fsdp"), self.device)
            for parameter in self._cut.values():
                parameter.grad = None
            self._set_mode(training=True)
            with peers_needed():
                scores = self._run(x, y, backward=True)
            for name, parameter in self._cut.items():
                if parameter.grad is not None:
                    self._flat[self._places[name]] = _local(parameter.grad).reshape(-1)
        return Shard(self._flat, self._no_counters, scores)

    def apply(self, mean: torch.Tensor, counters: torch.Tensor, lr: float) -> None:
        if self._job.train.clip_norm is not None:
            mean = mean * min(self._job.train.clip_norm / (self.gradient_norm + 1e-6), 1.0)
        for name, parameter in self._parameters.items():
            parameter.grad = mean[self._places[name]].view_as(parameter)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def squared_norm(self, mean: torch.Tensor) -> float:
        """This worker's share of the squared norm of the replica's mean gradient: the shares of all its workers add up to it."""
        copies = {name: self._copies(parameter) for name, parameter in self._cut.items()}
        squares = [mean[self._places[name]].double().square().sum() / copies[name] for name in self._parameters]
        return float(torch.stack(squares).sum()) if squares else 0.0

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
        self._set_mode(training=False)
        with torch.no_grad(), peers_needed():
            return self._run(x, y, backward=False)

    def metrics(self, extra: Sequence[float]) -> dict[str, float]:
        return {}

    def _set_mode(self, *, training: bool) -> None:
        for stage in self._stages:
            stage.train(training)

    def _run(self, x: np.ndarray, y: np.ndarray, backward: bool) -> torch.Tensor:
        """Forward, and backward of the sum of the losses, on this worker's share of the rows; the scores it has seen."""
        mine = shard_rows(len(y), self._ways.fsdp, self._mesh.get_local_rank("fsdp"))
        num_rows = mine.stop - mine.start
        if num_rows == 0:  # whoever has no rows takes part in the others' collectives with one that does not count
            mine = slice(0, 1)
        rows, labels = torch.tensor(x[mine], device=self.device), torch.tensor(y[mine], device=self.device)
        inputs, targets = self._task.torch_inputs(rows), self._task.torch_targets(rows, labels)
        if backward:
            inputs = self._task.torch_augment(inputs)
        # By first row: a pipeline also calls the loss to find out shapes, on the microbatch that comes first.
        scores: dict[int, torch.Tensor] = {}

        def loss(outputs: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
            """Loss of the outputs for the rows `which`; those past the last row are there to fill up and count nothing."""
            count = int((which < num_rows).sum())
            if count == 0:
                return outputs.sum() * 0.0
            outputs, expected = outputs[:count], targets[which[:count]]
            value = self._task.torch_loss(outputs, expected)
            with torch.no_grad():
                scores[int(which[0])] = torch.stack([value.double(), self._task.torch_correct(outputs, expected).double()])
            return value

        with self._autocast:
            if self._pipeline is not None:
                self._pipeline.run(inputs, loss, backward)
            else:
                value = loss(self._stages[0](inputs), torch.arange(len(inputs)))
        if self._pipeline is None and backward:
            value.backward()
        total = torch.zeros(NUM_SCORES, dtype=torch.float64, device=self.device)
        if self._mesh.get_local_rank("tensor") == 0:  # the others of the dimension have computed the same
            for part in scores.values():
                total += part
        return total

    def _copies(self, parameter: torch.Tensor) -> int:
        """Workers of the replica that hold the same elements of a parameter."""
        here = self._ways.fsdp * self._ways.tensor
        return here if not isinstance(parameter, DTensor) else here // parameter.device_mesh.size()

    # ---- state of the part ----

    def state(self) -> TrainState:
        return TrainState({name: on_host(p) for name, p in self._parameters.items()}, {}, self._slots())

    def load(self, state: TrainState) -> None:
        check_names("weights", {name: tuple(p.shape) for name, p in self._parameters.items()}, state.weights)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(torch.from_numpy(state.weights[name].copy()))
        self._load_slots(state.optimizer)

    def _slots(self) -> Arrays:
        slots: Arrays = {}
        for name, parameter in self._parameters.items():
            for slot, value in self._optimizer.state[parameter].items():
                if value.dim() == 0:  # the number of steps, the same for all
                    slots[slot] = on_host(value)
                else:
                    slots[f"{slot}.{name}"] = on_host(value)
        return slots

    def _load_slots(self, saved: Mapping[str, np.ndarray]) -> None:
        slots = dict.fromkeys(key.partition(".")[0] for key in saved)
        check_slots(slots, self._optimizer)
        self._optimizer.state.clear()
        for name, parameter in self._parameters.items():
            for slot in slots:
                value = torch.from_numpy((saved[slot] if slot in saved else saved[f"{slot}.{name}"]).copy())
                self._optimizer.state[parameter][slot] = value.to(self.device)

    # ---- the whole replica ----

    def weights(self) -> Arrays:
        """The whole parameters. All workers of the replica call it.

        They go the way of checkpoints: DTensor's own gathering remembers groups of earlier generations by their names.
        """
        with collective():
            mine = pack_part({name: cut.detach() for name, cut in self._cut.items()}, self._mates)
        own, places = dist.get_rank(self._mates), range(dist.get_world_size(self._mates))
        parts = [broadcast_bytes(mine if place == own else None, place, self._mates) for place in places]
        return join_parts({f"{place}.safetensors": part for place, part in enumerate(parts)})

    def tensors(self) -> dict[str, torch.Tensor]:
        """This worker's part as tensors that know their places in the whole ones: "weights/<name>", "optimizer/<slot>.<name>"."""
        found: dict[str, torch.Tensor] = {f"weights/{name}": cut.detach() for name, cut in self._cut.items()}
        for name, parameter in self._parameters.items():
            for slot, value in self._optimizer.state[parameter].items():
                if value.dim() == 0:
                    found[f"optimizer/{slot}"] = value
                else:
                    found[f"optimizer/{slot}.{name}"] = _like(value, self._cut[name])
        return found

    def load_whole(self, state: TrainState) -> None:
        """Takes its part of the state of a replica, however that one was cut."""
        mine = {name: self._part_of(state.weights[name], p) for name, p in self._cut.items() if name in state.weights}
        slots: Arrays = {}
        for key, array in state.optimizer.items():
            slot, _, name = key.partition(".")
            if not name:
                slots[slot] = array
            elif name in self._cut:
                slots[key] = self._part_of(array, self._cut[name])
        self.load(TrainState(mine, {}, slots))

    def export(self) -> bytes:
        raise NotImplementedError("own_file is None")

    def _part_of(self, array: np.ndarray, like: torch.Tensor) -> np.ndarray:
        whole = torch.from_numpy(array.copy())
        if not isinstance(like, DTensor):
            return on_host(whole)
        return on_host(_local(distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this worker has of a tensor, in the same memory."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _like(local: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """A part of a tensor that is cut as `cut` is."""
    if not isinstance(cut, DTensor):
        return local
    return DTensor.from_local(local, cut.device_mesh, cut.placements, shape=cut.shape, stride=cut.stride(), run_check=False)
