"""For any job, any override and any junk: it loads as written, or one clean error says why not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from raytrain_app.errors import JobError
from raytrain_app.job import job_from_dict, load_job, result_differences
from raytrain_app.job.yaml12 import YamlError, dump, parse

relaxed = settings(deadline=None)  # machines that run tests may be slow

plain_text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
tricky_text = st.sampled_from(
    ["1e-3", "no", "on", "null", "~", "010", "0o7", "1..4", "12:30", "2024-01-01", ".5", "-", "<<", "=", "# a", "a: b"]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | plain_text | tricky_text
plain_data = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text | tricky_text, inner, max_size=3),
    max_leaves=8,
)

positive = st.floats(1e-6, 1e3)
shards = st.integers(1, 64)
optimizers = st.fixed_dictionaries(
    {"name": st.just("sgd")}, optional={"lr": positive, "momentum": st.floats(0, 0.99)}
) | st.fixed_dictionaries(
    {"name": st.sampled_from(["adam", "adamw"])},
    optional={
        "lr": positive,
        "betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
        "schedule": st.just("cosine"),
        "eps": positive,
    },
)
jobs = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"[a-z0-9][a-z0-9._-]{0,8}[a-z]", fullmatch=True),
        "task": st.sampled_from(["mnist", "synthetic", "pkg.mod:TASK", "1e3"]),
        "model": st.dictionaries(plain_text, plain_data, max_size=3).flatmap(lambda extra: st.just({**extra, "name": "cnn"})),
    },
    optional={
        "data": st.fixed_dictionaries(
            {}, optional={"source": st.none() | plain_text | tricky_text, "label_offset": st.integers(-9, 9)}
        ),
        "train": st.fixed_dictionaries(
            {"global_batch_size": st.integers(64, 512)},
            optional={
                "virtual_shards": st.just("auto") | shards,
                "seed": st.integers(0, 2**63 - 1),
                "clip_norm": st.none() | positive,
            },
        ),
        "optimizer": optimizers,
        "scaling": st.fixed_dictionaries(
            {"workers": shards | st.tuples(shards, shards).map(lambda pair: f"{min(pair)}..{max(pair)}")}
        ),
        "checkpoint": st.fixed_dictionaries({"monitor": st.sampled_from(["val_loss", "val_accuracy", "loss", "accuracy"])}),
        "audit": st.booleans(),
    },
)


@relaxed
@given(jobs)
@example({"name": "a", "task": "mnist", "model": {"name": "cnn", "limit": float("inf")}})
def test_a_job_written_out_loads_back_equal(raw: dict[str, Any]) -> None:
    try:
        job = job_from_dict(raw)
    except JobError as error:
        assume("virtual_shards" not in str(error))  # fewer shards than workers, as drawn
        raise
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.yaml")
        path.write_text(job.to_yaml())
        again = load_job(str(path))
    assert again == job
    assert again.to_yaml() == job.to_yaml()
    assert result_differences(job, again) == []
    assert job_from_dict(job.model_dump(mode="json")) == job  # as it travels to the workers
    assert again.model.options == {key: value for key, value in raw["model"].items() if key != "name"}


@relaxed
@given(plain_data)
@example({"\x85": "\x85\u2028a"})
def test_yaml_written_reads_back_the_same(value: Any) -> None:
    again = parse(dump(value)).value
    assert again == value
    assert repr(again) == repr(value)


def _paths(raw: Any, prefix: str = "") -> list[str]:
    if not isinstance(raw, dict):
        return [prefix.rstrip(".")]
    return [path for key, value in raw.items() for path in _paths(value, f"{prefix}{key}.")]


DEFAULTS = job_from_dict({"name": "a", "task": "mnist", "model": {"name": "cnn"}})
KNOWN = _paths(DEFAULTS.model_dump(mode="json"))


@relaxed
@given(st.sampled_from(KNOWN), plain_data)
def test_an_override_is_taken_or_named(path: str, value: Any) -> None:
    override = f"{path}={dump(value)}"
    raw = DEFAULTS.model_dump(mode="json")
    try:
        job = job_from_dict(raw, [override])
    except JobError as error:
        assert path in str(error)  # noqa: PT017  both ends are right
        return
    assert job == job_from_dict(_with(raw, path.split("."), value))


def _with(raw: dict[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    return {**raw, keys[0]: value if len(keys) == 1 else _with(raw[keys[0]], keys[1:], value)}


@relaxed
@given(st.sampled_from(KNOWN), st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8))
def test_an_unknown_override_is_refused(path: str, key: str) -> None:
    section = path.rpartition(".")[0]
    unknown = f"{section}.{key}" if section else key
    assume(unknown not in KNOWN and section != "model" and not any(known.startswith(unknown + ".") for known in KNOWN))
    assume(section != "scaling.resources_per_worker")  # any name may be a resource
    with pytest.raises(JobError, match=unknown):
        job_from_dict(DEFAULTS.model_dump(mode="json"), [f"{unknown}=1"])


@relaxed
@given(st.dictionaries(st.sampled_from(list(DEFAULTS.model_dump())) | plain_text, plain_data, max_size=6))
def test_junk_with_known_keys_is_one_clean_error(raw: dict[str, Any]) -> None:
    with pytest.raises(JobError):
        job_from_dict({**raw, "unknown key": 1})


@relaxed
@given(st.binary(max_size=80) | st.text("{}[]:,-#&*!|>'\"%@`? \n\tabc01.~<", max_size=60).map(lambda text: text.encode()))
def test_junk_files_are_one_clean_error(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.yaml")
        path.write_bytes(content)
        with pytest.raises(JobError, match="job"):
            load_job(str(path))


@relaxed
@given(st.text("{}[]:,-#&*!|>'\"%@`? \n\tabc01.~<", max_size=40))
def test_junk_yaml_is_parsed_or_refused(text: str) -> None:
    try:
        value = parse(text).value
    except YamlError as error:
        assert str(error).startswith("line ")  # noqa: PT017  both ends are right
    else:
        assert parse(dump(value)).value == value or value != value
