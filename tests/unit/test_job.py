"""The job file: what is accepted, what is refused, and that every problem is named at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_app.errors import JobError
from raytrain_app.job import Adam, AdamW, AllReduce, EarlyStopping, Job, Sgd, job_from_dict, load_job

SMALL = {"name": "a", "task": "mnist", "model": {"name": "cnn"}}

FULL = """\
name: mnist-torch
task: mnist
framework: torch
model: {name: cnn, dropout: 0.25}
data: {source: mnist-sample, format: auto, validation_fraction: 0.1, order: global}
train:
  epochs: 3
  global_batch_size: 128
  virtual_shards: auto
  reduction: exact
  precision: fp32
  seed: 0
  clip_norm: null
  threads: 1
  portable: false
  early_stopping: {monitor: val_accuracy, patience: 2}
optimizer: {name: adam, lr: 2e-3, schedule: cosine, warmup_steps: 10}
strategy: {name: allreduce}
scaling:
  workers: 1..4
  resources_per_worker: {CPU: 2}
  wait_s: 300
checkpoint: {every_steps: 200, keep: 3, monitor: val_loss, mode: min}
failure: {max_restarts: 20, heartbeat_s: 15}
storage: gs://bucket/runs
audit: false
tensorboard: true
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(FULL)
    return path


def problems(raw: dict[str, object], *overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        job_from_dict({**SMALL, **raw}, overrides)
    return str(caught.value)


def test_full_file(job_file: Path) -> None:
    job = load_job(str(job_file))
    assert job.model.name == "cnn"
    assert job.model.options == {"dropout": 0.25}
    assert isinstance(job.optimizer, Adam)
    assert job.optimizer.lr == 0.002
    assert job.optimizer.warmup_steps == 10
    assert job.train.early_stopping == EarlyStopping(monitor="val_accuracy", mode="max", patience=2)
    assert (job.scaling.workers.min, job.scaling.workers.max) == (1, 4)
    assert job.num_shards == 4
    assert job.scaling.resources_per_worker == {"CPU": 2.0, "GPU": 0.0}
    assert not job.scaling.uses_gpu
    assert job.failure.heartbeat_s == 15
    assert job.storage == "gs://bucket/runs"


def test_defaults() -> None:
    job = job_from_dict(SMALL)
    assert job.optimizer == Adam()
    assert job.strategy == AllReduce()
    assert job.num_shards == 1
    assert job.data.source is None
    assert job.scaling.resources_per_worker == {"CPU": 1.0, "GPU": 0.0}


def test_written_out_it_loads_back_equal(job_file: Path, tmp_path: Path) -> None:
    job = load_job(str(job_file), ["scaling.workers=3"])
    (tmp_path / "again.yaml").write_text(job.to_yaml())
    assert load_job(str(tmp_path / "again.yaml")) == job


def test_overrides_and_name(job_file: Path) -> None:
    job = load_job(
        str(job_file),
        [
            "optimizer={name: sgd, lr: 1}",
            "optimizer.lr=1e-3",
            "scaling.workers=2..3",
            "train.early_stopping=null",
            "train.seed=7",
        ],
        name="other",
    )
    assert job.optimizer == Sgd(name="sgd", lr=0.001)
    assert job.name == "other"
    assert str(job.scaling.workers) == "2..3"
    assert job.train.early_stopping is None
    assert job.train.seed == 7


def test_overrides_make_the_section_they_need_and_leave_the_input_alone() -> None:
    raw = {**SMALL, "train": {"epochs": 2}}
    job = job_from_dict(raw, ["train.early_stopping.patience=4", "optimizer.lr=0.1", "train.seed=1"])
    assert job.train.early_stopping == EarlyStopping(patience=4)
    assert job.optimizer == Adam(lr=0.1)
    assert raw == {**SMALL, "train": {"epochs": 2}}


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        job_from_dict(SMALL).name = "b"


@pytest.mark.parametrize(
    ("workers", "low", "high"),
    [(3, 3, 3), ("1..4", 1, 4), ("2 .. 2", 2, 2), ("5", None, None), ("4..1", None, None), (0, None, None)],
)
def test_workers(workers: object, low: int | None, high: int | None) -> None:
    if low is None:
        assert "scaling.workers" in problems({"scaling": {"workers": workers}}) or workers == "5"
    else:
        found = job_from_dict({**SMALL, "scaling": {"workers": workers}}).scaling.workers
        assert (found.min, found.max) == (low, high)


def test_mode_follows_the_metric() -> None:
    job = job_from_dict({**SMALL, "checkpoint": {"monitor": "val_accuracy"}, "train": {"early_stopping": {"monitor": "loss"}}})
    assert job.checkpoint.mode == "max"
    assert job.train.early_stopping is not None
    assert job.train.early_stopping.mode == "min"


def test_adamw_decays_by_default_and_adam_does_not() -> None:
    assert job_from_dict(SMALL, ["optimizer.name=adamw"]).optimizer == AdamW(name="adamw", weight_decay=0.01)
    assert job_from_dict(SMALL, ["optimizer.name=adam"]).optimizer == Adam(weight_decay=0.0)


def test_gpus_declared_on_cpu_machines() -> None:
    scaling = {"workers": 2, "resources_per_worker": {"GPU": 1}}
    assert job_from_dict({**SMALL, "scaling": scaling}).scaling.uses_gpu
    assert not job_from_dict({**SMALL, "scaling": {**scaling, "device": "cpu"}}).scaling.uses_gpu


SERVERS = {"name": "parameter_server"}
ONE_PROBLEM = [
    ({"name": "../up"}, 'name: found "../up"; expected at most 100 letters'),
    ({"name": "a."}, "name: found"),
    ({"name": 5}, "name: found 5; expected text"),
    ({"framework": "pytorch"}, 'framework: found "pytorch"; expected torch or tensorflow; did you mean torch?'),
    ({"model": "cnn"}, 'model: found "cnn"; expected a section of keys and values, such as {name: ...}'),
    ({"model": {"dropout": 0.5}}, "model.name: is missing"),
    ({"train": {"epocs": 3}}, "train.epocs: unknown key; expected epochs, "),
    ({"train": {"epocs": 3}}, "did you mean epochs?"),
    ({"train": {"lr": 0.1}}, "train.lr: unknown key; expected epochs, "),
    ({"train": {"lr": 0.1}}, "did you mean optimizer.lr?"),
    ({"train": {"epochs": 0}}, "train.epochs: found 0; expected at least 1"),
    ({"train": {"epochs": True}}, "train.epochs: found true; expected a whole number"),
    ({"train": {"epochs": 10**400}}, "expected at most 2147483647"),
    ({"train": {"virtual_shards": 2.5}}, "train.virtual_shards: found 2.5; expected auto or a whole number of at least 1"),
    ({"train": {"precision": "fp16"}}, 'train.precision: found "fp16"; expected fp32 or bf16'),
    ({"train": {"clip_norm": float("nan")}}, "train.clip_norm: found NaN; expected a finite number"),
    ({"train": {"early_stopping": {"monitor": "acc"}}}, "train.early_stopping.monitor: found"),
    ({"audit": "yes"}, 'audit: found "yes"; expected true or false'),
    ({"optimizer": {"name": "sgd", "betas": [0.9, 0.99]}}, "optimizer.betas: unknown key; it belongs to optimizer adam or adamw"),
    ({"optimizer": {"momentum": 0.9}}, "optimizer.momentum: unknown key; it belongs to optimizer sgd"),
    ({"optimizer": {"name": "adm"}}, 'optimizer.name: found "adm"; expected sgd, adam or adamw; did you mean adam?'),
    ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1: found 1.0; expected a number below 1"),
    ({"optimizer": {"betas": [0.9]}}, "optimizer.betas: found [0.9]; expected two numbers"),
    ({"optimizer": {"warmup_steps": 5}}, "optimizer.warmup_steps: found 5 with schedule: constant"),
    ({"strategy": {"name": "allreduce", "servers": 2}}, "strategy.servers: unknown key; it belongs to strategy parameter_server"),
    ({"strategy": {**SERVERS, "sync": "bounded"}}, "strategy.staleness: found null with sync: bounded, which bounds it"),
    ({"strategy": {**SERVERS, "sync": "bulk", "staleness": 3}}, "strategy.staleness: found 3 with sync: bulk"),
    ({"strategy": {**SERVERS, "sync": "bulk"}, "train": {"clip_norm": 1}}, "train.clip_norm: found 1 with sync: bulk"),
    ({"strategy": SERVERS, "train": {"reduction": "fast"}}, "train.reduction: found fast, which is about all-reduce"),
    ({"strategy": {**SERVERS, "servers": 0}}, "strategy.servers: found 0; expected at least 1"),
    (
        {"strategy": {**SERVERS, "correction": "gapp"}},
        'found "gapp"; expected none, staleness, gap or delay',
    ),
    ({"scaling": {"workers": 4}, "train": {"virtual_shards": 2}}, "scaling.workers: found 4, but train.virtual_shards is 2"),
    ({"scaling": {"workers": 4}, "train": {"global_batch_size": 3}}, "train.global_batch_size: found 3; expected at least 4"),
    ({"strategy": {"name": "model_parallel"}}, "strategy.fsdp: found 1, and tensor and pipeline are 1 too"),
    ({"strategy": {"name": "model_parallel", "fsdp": 2}, "scaling": {"workers": "2..3"}}, "found 2..3, but fsdp x tensor x"),
    (
        {"strategy": {"name": "model_parallel", "pipeline": 2}, "scaling": {"workers": 2}},
        "strategy.microbatches: found 1 for a pipeline of 2 stages; expected at least as many",
    ),
    (
        {"strategy": {"name": "model_parallel", "fsdp": 2, "microbatches": 2}, "scaling": {"workers": 2}},
        "strategy.microbatches: found 2 for a pipeline of 1 stages; expected 1",
    ),
    (
        {"strategy": {"name": "model_parallel", "fsdp": 2, "schedule": "interleaved"}, "scaling": {"workers": 2}},
        "strategy.schedule: found interleaved without a pipeline; expected 1f1b",
    ),
    (
        {
            "strategy": {"name": "model_parallel", "pipeline": 2, "microbatches": 2, "schedule": "interleaved"},
            "scaling": {"workers": 2},
        },
        "strategy.stages_per_worker: found 1 with schedule: interleaved; expected 2 or more",
    ),
    (
        {
            "strategy": {"name": "model_parallel", "pipeline": 2, "microbatches": 2, "stages_per_worker": 2},
            "scaling": {"workers": 2},
        },
        "strategy.stages_per_worker: found 2 with schedule: 1f1b; expected 1, or schedule: interleaved",
    ),
    (
        {
            "strategy": {
                "name": "model_parallel",
                "pipeline": 2,
                "microbatches": 5,
                "stages_per_worker": 2,
                "schedule": "interleaved",
            },
            "scaling": {"workers": 2},
        },
        "strategy.microbatches: found 5, which 2 workers take in 2 turns with schedule: interleaved; expected a multiple of 2",
    ),
    (
        {"strategy": {"name": "model_parallel", "fsdp": 2}, "scaling": {"workers": 2}, "framework": "tensorflow"},
        "only PyTorch's modules can be cut over workers; expected framework: torch, or strategy: {name: allreduce}",
    ),
    (
        {"strategy": {"name": "model_parallel", "fsdp": 2}, "scaling": {"workers": 2}, "train": {"reduction": "fast"}},
        "train.reduction: found fast, but replicas in parts are added up exactly alone",
    ),
    ({"scaling": {"resources_per_worker": {"gpu": 1}}}, "expected Ray's own names (CPU and GPU)"),
    (
        {"scaling": {"resources_per_worker": {"CPU": 1.5}}},
        "scaling.resources_per_worker.CPU: found 1.5; expected a whole number when above 1",
    ),
    ({"scaling": {"resources_per_worker": {"GPU": 0.5}, "workers": 2}}, "NCCL cannot reduce between workers on one GPU"),
    ({"scaling": {"resources_per_worker": {"GPU": 2}}}, "a worker computes on one GPU"),
    ({"scaling": {"device": "cuda"}}, "scaling.device: found cuda, but scaling.resources_per_worker.GPU is 0"),
    (
        {"train": {"cuda_graphs": True}},
        "train.cuda_graphs: found true, but workers compute on CPUs; expected false, or GPU: 1",
    ),
    (
        {"train": {"cuda_graphs": True, "reduction": "fast"}, "scaling": {"resources_per_worker": {"GPU": 1}}},
        "train.cuda_graphs: found true, but the reduction is fast",
    ),
    ({"checkpoint": {"monitor": "val_accuracy", "mode": "min"}}, "checkpoint.mode: found min; expected max for val_accuracy"),
    ({"data": {"validation_fraction": 0}}, "checkpoint.monitor: found val_loss, but data.validation_fraction is 0"),
    ({"data": {"validation_fraction": 1}}, "data.validation_fraction: found 1; expected a number below 1"),
    ({"data": {"on_bad_row": "skip"}}, "data.on_bad_row: found"),
    ({"storage": "s3://key:secret@bucket/x"}, 'storage: found "s3://***@bucket/x"; expected no secrets'),
    ({"storage": "ftp://host/x"}, 'storage: found "ftp://host/x"; expected a folder, gs://bucket/path or s3://bucket/path'),
]


@pytest.mark.parametrize(("raw", "expected"), ONE_PROBLEM)
def test_one_problem_is_one_sentence(raw: dict[str, object], expected: str) -> None:
    message = problems(raw)
    assert expected in message
    assert message.startswith("job: ")
    assert "\n" not in message


def test_all_problems_at_once_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "name: no/such\ntask: mnist\nmodel: {name: cnn}\ntrain:\n  epocs: 3\n  global_batch_size: 1\n"
        "optimizer: {name: sgd, lr: fast}\nstrategy: {name: parameter_servr, tensor: 2, microbatchs: 2}\nscaling:\n  workers: 4\n"
    )
    with pytest.raises(JobError) as caught:
        load_job(str(path), ["data.ordr=global", "checkpoint.keep=0", "nonsense", "a.b={", "name.x=1"])
    message = str(caught.value)
    assert message.startswith(f"{path}: 11 problems\n")
    for expected in (
        "--set nonsense: expected KEY=VALUE",
        "--set a.b={: line 1, column 2: while parsing a flow node",
        "--set name.x=1: name is a value, not a section",
        'name (line 1): found "no/such"',
        "train.epocs (line 5): unknown key",
        "train.global_batch_size (line 6): found 1; expected at least 2",
        'optimizer.lr (line 7): found "fast"; expected a number',
        'strategy.name (line 8): found "parameter_servr"; expected allreduce, parameter_server or model_parallel; did you mean',
        "strategy.microbatchs (line 8): unknown key",
        "data.ordr (--set data.ordr=global): unknown key; expected source, ",
        "did you mean order?",
        "checkpoint.keep (--set checkpoint.keep=0): found 0; expected at least 1",
    ):
        assert expected in message, expected


def test_a_rule_is_silent_where_its_keys_are_wrong() -> None:
    message = problems({"scaling": {"workers": "many"}, "train": {"virtual_shards": 1}})
    assert message.count("scaling.workers") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"name: a\nname: b\n", "line 2, column 1: key 'name' is here for the second time"),
        (b"name: a\ntask: [\n", "line 3, column 1"),
        (b"name: a\n\ttask: b\n", "line 2, column 1: while scanning for the next token, found character '\\t'"),
        (b"a: &x 1\nb: *x\n", "line 2, column 4: aliases (*name) are not supported"),
        (b"a: !!python/object:os.system {}\n", "tag"),
        (b"a: !!set {b}\n", "tag"),
        (b"a: !!bool maybe\n", "line 1, column 4: 'maybe' cannot be used as bool"),
        (b"--- 1\n--- 2\n", "expected a single document"),
        (b"name: \x00\n", "line 1: character"),
        (b"name: caf\xe9\n", "byte 9 is not UTF-8"),
        (b"", "is empty; `raytrain init`"),
        (b"# nothing\n", "is empty"),
        (b"- 1\n", "holds list instead of keys and values"),
        (b"[" * 5000, "nested too deeply"),
        (b"a: " + b"9" * 5000, "99' cannot be used as int"),
    ],
)
def test_malformed_files(tmp_path: Path, text: bytes, expected: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(text)
    with pytest.raises(JobError) as caught:
        load_job(str(path))
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file"):
        load_job(str(tmp_path / "none.yaml"))
    with pytest.raises(JobError, match="Is a directory"):
        load_job(str(tmp_path))


def test_words_and_numbers_mean_what_they_say(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: no\ntask: off\nmodel: {name: 'yes', width: 010, rate: 1e-3, day: 2024-01-01, time: 12:30}\n")
    job = load_job(str(path))
    assert (job.name, job.task, job.model.name) == ("no", "off", "yes")
    assert job.model.options == {"width": 10, "rate": 0.001, "day": "2024-01-01", "time": "12:30"}


def test_a_job_made_by_hand_obeys_the_rules_too() -> None:
    with pytest.raises(ValueError, match=r"scaling.workers: found 4"):
        Job.model_validate({**SMALL, "scaling": {"workers": 4}, "train": {"virtual_shards": 2}})
