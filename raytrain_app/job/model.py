"""The job: what a job file says, as one frozen value. Every field is the key of the same name in the YAML."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from raytrain_app.job import yaml12
from raytrain_app.job.fields import Amount, Count, CountOrZero, Fraction, Positive, Seconds, Section, default_name
from raytrain_app.job.rules import broken_rules
from raytrain_app.job.strategies import AllReduce, ModelParallel, ParameterServer, Strategy

Metric = Literal["loss", "accuracy", "val_loss", "val_accuracy"]
Mode = Literal["min", "max"]


def _safe_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9_-])?", value):
        raise PydanticCustomError("safe_name", "at most 100 letters, digits, '.', '_' and '-', starting with a letter or digit")
    return value


def _storage_uri(value: str) -> str:
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", value)
    if not value.strip() or (scheme and scheme[1] not in ("gs", "s3", "file")):
        raise PydanticCustomError("storage_uri", "a folder, gs://bucket/path or s3://bucket/path")
    if re.match(r"\w+://[^/]*:[^/]*@", value):
        raise PydanticCustomError(
            "storage_uri", "no secrets, since the job is kept with the run; set AWS_ACCESS_KEY_ID and such instead"
        )
    return value


def _int_or_auto(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value != "auto" and not (whole and 1 <= value < 2**31):
        raise PydanticCustomError("int_or_auto", "auto or a whole number of at least 1")
    return value


def _betas(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise PydanticCustomError("betas", "two numbers from 0 to below 1, such as [0.9, 0.999]")
    return tuple(value)


def _names(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise PydanticCustomError("names", "a list of names, such as [mlflow]")
    return tuple(value)


class Model(Section):
    """`model:`; the keys beside `name` are the model's own options, checked by the task."""

    model_config = ConfigDict(extra="allow")

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The keys beside `name`."""
        return dict(self.__pydantic_extra__ or {})


class Data(Section):
    """`data:`; where the rows come from and how they are checked, split and ordered.

    Attributes:
        source: a known data set's name, a path, a glob or a URI; None is the task's own default.
        test_source: where the test rows come from when `source` has none.
        classes: number of classes; None is the task's own.
        transpose: swap rows and columns of each image (EMNIST stores them transposed).
        label_offset: taken away from every label as stored (1 for EMNIST letters, which are 1..26).
        one_hot: the label is one column a class, after the pixels, with a 1 in the row's class.
        window_mib: MiB that one window of the windowed order has; a node needs room for two of them.
        on_bad_row: a row that fails validation ends the run, or is dropped and counted.
        allow_modified: accept a well-known file whose checksum is not the published one.
        offline: never download; use only what is there.
    """

    source: str | None = None
    test_source: str | None = None
    format: Literal["auto", "idx", "npz", "csv", "parquet", "images"] = "auto"
    validation_fraction: Fraction = 0.1
    order: Literal["global", "windowed"] = "global"
    classes: Count | None = None
    transpose: bool = False
    label_offset: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    one_hot: bool = False
    window_mib: Count = 64
    on_bad_row: Literal["fail", "drop"] = "fail"
    allow_modified: bool = False
    offline: bool = False


class _Monitor(Section):
    """A metric and which way it gets better; `mode` follows from `monitor` when it is not given."""

    monitor: Metric = "val_loss"
    mode: Mode = "min"

    @model_validator(mode="before")
    @classmethod
    def _mode_of_monitor(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and "mode" not in raw and str(raw.get("monitor")).endswith("accuracy"):
            return {**raw, "mode": "max"}
        return raw


class EarlyStopping(_Monitor):
    """`train.early_stopping:`; stop after `patience` epochs in a row without a gain of more than `min_delta`."""

    patience: Count = 3
    min_delta: Annotated[float, Field(ge=0)] = 0.0


class Train(Section):
    """`train:`; everything about the steps that is not the optimizer.

    Attributes:
        virtual_shards: parts that each global batch is cut into, the most workers that can share it; "auto" is
            `scaling.workers.max`.
        reduction: "exact" gives the same bits for any number of workers, "fast" is the framework's own all-reduce.
        clip_norm: the largest global norm of the mean gradient; None clips nothing.
        threads: intra-op threads of a worker. Part of the result: sums are cut differently for another number.
        portable: cap the CPU instruction set, so that different CPU models give the same bits.
        cuda_graphs: record what a shard does on the GPU and launch it as a whole, for a task whose code is the same each step.
    """

    epochs: Count = 1
    global_batch_size: Count = 128
    virtual_shards: Annotated[Literal["auto"] | int, BeforeValidator(_int_or_auto)] = "auto"
    reduction: Literal["exact", "fast"] = "exact"
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    clip_norm: Positive | None = None
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    portable: bool = False
    cuda_graphs: bool = False
    early_stopping: EarlyStopping | None = None


class _Optimizer(Section):
    name: str
    lr: Positive = 0.001
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: CountOrZero = 0


class Sgd(_Optimizer):
    """`optimizer: {name: sgd}`; stochastic gradient descent, with `momentum` if above 0."""

    name: Literal["sgd"]
    momentum: Fraction = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


class Adam(_Optimizer):
    """`optimizer: {name: adam}`; `weight_decay` is added to the gradient (L2)."""

    name: Literal["adam"] = "adam"
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(_betas)] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


class AdamW(_Optimizer):
    """`optimizer: {name: adamw}`; `weight_decay` shrinks the weights directly (decoupled)."""

    name: Literal["adamw"]
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(_betas)] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.01


Optimizer = Annotated[Sgd | Adam | AdamW, Field(discriminator="name"), default_name("adam")]


class Workers(Section):
    """`scaling.workers:`; written as a number or as min..max."""

    min: Count
    max: Count

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, raw: Any) -> Any:
        if isinstance(raw, Workers):
            return raw
        if isinstance(raw, int) and not isinstance(raw, bool) and 1 <= raw < 2**31:
            return {"min": raw, "max": raw}
        span = re.fullmatch(r"\s*([0-9]{1,9})\s*\.\.\s*([0-9]{1,9})\s*", raw) if isinstance(raw, str) else None
        if span and 1 <= int(span[1]) <= int(span[2]):
            return {"min": int(span[1]), "max": int(span[2])}
        raise PydanticCustomError("workers", "a number of workers of at least 1, or min..max with min <= max, such as 1..4")

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}..{self.max}"


def _workers_as_written(workers: Workers) -> int | str:
    return workers.min if workers.min == workers.max else str(workers)


def _resources(amounts: dict[str, float]) -> dict[str, float]:
    for name in amounts:
        plain = name.upper().removesuffix("S")
        if not name or (plain in ("CPU", "GPU") and name != plain):
            raise PydanticCustomError("resources", "Ray's own names (CPU and GPU) or names that the cluster declares")
    return {"CPU": 1.0, "GPU": 0.0, **amounts}


class Scaling(Section):
    """`scaling:`; how many workers, what each takes from the cluster, and what it computes on.

    Attributes:
        resources_per_worker: Ray resources by name; CPU is 1 and GPU is 0 where not given.
        device: "auto" is cuda when a worker has a GPU, else cpu. "cpu" with GPUs takes their places without using them.
        wait_s: how long to wait for the minimum of workers before giving up.
    """

    workers: Annotated[Workers, PlainSerializer(_workers_as_written)] = Workers.model_validate(1)
    resources_per_worker: Annotated[dict[str, Amount], AfterValidator(_resources)] = Field(
        default_factory=lambda: {"CPU": 1.0, "GPU": 0.0}
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    wait_s: Seconds = 300.0

    @property
    def uses_gpu(self) -> bool:
        """Whether workers compute on a GPU."""
        return self.device == "cuda" or (self.device == "auto" and self.resources_per_worker["GPU"] > 0)


class Checkpoint(_Monitor):
    """`checkpoint:`; every how many steps, how many to keep beside the best, and what "best" means."""

    every_steps: Count = 200
    keep: Count = 3


class Failure(Section):
    """`failure:`; crashes to bear (lost machines do not count) and the deadline on a worker that goes silent."""

    max_restarts: CountOrZero = 20
    heartbeat_s: Positive = 30.0


class Job(Section):
    """One training job. Build it with `load_job` or `job_from_dict`, which report every problem at once."""

    model_config = ConfigDict(protected_namespaces=())

    name: Annotated[str, AfterValidator(_safe_name)]
    task: str
    framework: Literal["torch", "tensorflow"] = "torch"
    model: Model
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Adam()
    strategy: Strategy = AllReduce()
    scaling: Scaling = Scaling()
    checkpoint: Checkpoint = Checkpoint()
    failure: Failure = Failure()
    storage: Annotated[str, AfterValidator(_storage_uri)] = "runs"
    audit: bool = False
    tensorboard: bool = True
    trackers: Annotated[tuple[Literal["mlflow", "wandb"], ...], BeforeValidator(_names)] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = list(broken_rules(self))
        if broken:
            lines = "; ".join(f"{rule.path}: {rule.text}" for rule in broken)
            raise PydanticCustomError("rules", "{lines}", {"lines": lines, "broken": broken})
        return self

    @property
    def replica_workers(self) -> int:
        """Workers that hold a replica together."""
        ways = self.strategy
        return ways.fsdp * ways.tensor * ways.pipeline if isinstance(ways, ModelParallel) else 1

    @property
    def num_shards(self) -> int:
        """Virtual shards of a global batch, with "auto" resolved: one for each replica that there may be."""
        shards = self.train.virtual_shards
        return -(-self.scaling.workers.max // self.replica_workers) if shards == "auto" else shards

    @property
    def uses_tf_distribute(self) -> bool:
        """Whether one of TensorFlow's own strategies trains, in which a group of workers cannot change."""
        return self.strategy.name == "allreduce" and self.strategy.tf_distribute is not None

    @property
    def most_workers(self) -> int:
        """Workers that can be at work at a time: those of parameter servers need not share a batch."""
        free = isinstance(self.strategy, ParameterServer) and self.strategy.sync != "bulk"
        return 2**31 - 1 if free else self.num_shards * self.replica_workers

    @property
    def same_bits(self) -> bool:
        """Whether the result has the same bits for any number of workers, and whatever happens to them."""
        return self.train.reduction == "exact" and self.most_workers < 2**31 - 1

    def to_yaml(self) -> str:
        """The job with every default written out; `load_job` reads it back to an equal job."""
        return yaml12.dump(self.model_dump())
