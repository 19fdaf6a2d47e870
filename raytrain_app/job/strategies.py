"""`strategy:`; how replicas are spread over workers, and how parameters move."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytrain_app.job.fields import Amount, Count, CountOrZero, Section, default_name


class AllReduce(Section):
    """`strategy: {name: allreduce}`; replicas add their gradients each step. `tf_distribute` picks TensorFlow's own strategy."""

    name: Literal["allreduce"] = "allreduce"
    tf_distribute: Literal["multi_worker_mirrored", "mirrored", "central_storage", "one_device"] | None = None


class ParameterServer(Section):
    """`strategy: {name: parameter_server}`; workers push gradients to server actors, each at its own pace.

    Attributes:
        servers: actors that hold equal byte ranges of the parameters; `raytrain scale` changes it while the run goes on.
        staleness: updates that a gradient may have missed; one that missed more is refused and computed again. None is no
            bound.
        sync: "async", nobody waits; "bounded", a worker waits before it could make another's gradient miss more than
            `staleness` updates; "bulk", all work on the same step, which is made of `train.virtual_shards` parts.
        correction: how a gradient that missed updates is corrected; see the README for each one's source.
        update: the servers' update rule. "auto" is that of `optimizer`; any other takes its learning rate, schedule and
            weight decay from there.
        server_cpus: CPUs that each server takes from the cluster, and computes with. Without any it borrows up to four for
            moments.
    """

    name: Literal["parameter_server"]
    servers: Annotated[int, Field(ge=1, le=256)] = 1
    staleness: CountOrZero | None = None
    sync: Literal["async", "bounded", "bulk"] = "async"
    correction: Literal["none", "staleness", "gap", "delay"] = "gap"
    update: Literal["auto", "sgd", "momentum", "adagrad", "adam"] = "auto"
    server_cpus: Amount = 0.0


class ModelParallel(Section):
    """`strategy: {name: model_parallel}`; a replica is spread over fsdp x tensor x pipeline workers.

    Attributes:
        fsdp: workers that share out the rows of a shard, and keep only their part of parameters, gradients and optimizer
            state between uses (fully sharded data parallelism).
        tensor: workers that share out each of the task's linear layers.
        pipeline: workers that share out the task's chain of modules, in stages.
        microbatches: parts in which the rows go through the pipeline.
        schedule: order of the microbatches' forward and backward passes.
        stages_per_worker: with schedule "interleaved", stages of each worker, which follow each other round the workers: the
            more of them, the shorter the others wait for the first and the last microbatch, and the more travels.
        balance: what the stages have equal shares of: parameters, or floating-point operations of a forward pass.
        activation_checkpointing: keep the inputs of each block alone, and compute it again for its backward pass.
    """

    name: Literal["model_parallel"]
    fsdp: Count = 1
    tensor: Count = 1
    pipeline: Count = 1
    microbatches: Count = 1
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    stages_per_worker: Count = 1
    balance: Literal["parameters", "flops"] = "parameters"
    activation_checkpointing: bool = False


Strategy = Annotated[AllReduce | ParameterServer | ModelParallel, Field(discriminator="name"), default_name("allreduce")]
