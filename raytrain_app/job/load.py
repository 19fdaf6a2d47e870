"""From a job file and `--set` to a `Job`, or to one error that lists every problem."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raytrain_app.errors import JobError
from raytrain_app.job import yaml12
from raytrain_app.job.model import Job
from raytrain_app.job.problems import find_problems

Keys = tuple[str, ...]


def load_job(path: str, overrides: Sequence[str] = (), name: str | None = None) -> Job:
    """Reads a job file.

    Args:
        path: the YAML file.
        overrides: `a.b=c` each, as given to `--set`; the value is YAML, later ones win.
        name: replaces the job's `name`.

    Raises:
        JobError: the file cannot be read, or anything in it or in `overrides` is wrong; all problems are listed.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise JobError(
            f"job file {path}: cannot be read: {error.strerror or error}; `raytrain init` writes one to begin with"
        ) from None
    except UnicodeDecodeError as error:
        raise JobError(f"job file {path}: byte {error.start} is not UTF-8; expected a YAML text file") from None
    return job_from_text(text, path, overrides, name)


def job_from_text(text: str, source: str, overrides: Sequence[str] = (), name: str | None = None) -> Job:
    """As `load_job`, for the text of a job file; `source` is what errors call it."""
    try:
        document = yaml12.parse(text)
    except yaml12.YamlError as error:
        raise JobError(f"job file {source}, {error}") from None
    if not isinstance(document.value, dict):
        found = "is empty" if document.value is None else f"holds {type(document.value).__name__} instead of keys and values"
        raise JobError(f"job file {source}: {found}; `raytrain init` writes one to start from")
    return job_from_dict(document.value, overrides, name, source=source, lines=document.lines)


def job_from_dict(
    raw: Mapping[str, Any],
    overrides: Sequence[str] = (),
    name: str | None = None,
    *,
    source: str = "job",
    lines: Mapping[Keys, int] | None = None,
) -> Job:
    """Builds a job from plain data, as `load_job` does from a file.

    Args:
        raw: keys and values as in the job file.
        overrides: `a.b=c` each, as given to `--set`.
        name: replaces the job's `name`.
        source: what errors call `raw`.
        lines: line numbers of the keys in `source`, for errors.

    Raises:
        JobError: anything is wrong; all problems are listed.
    """
    change = _Overridden(dict(raw))
    for text in overrides:
        change.apply(text)
    if name is not None:
        change.put(("name",), name, f"--name {name}")
    job, problems = find_problems(change.data)
    listed = change.problems + [f"{_where(keys, change.origin, lines or {})}: {text}" for keys, text in problems]
    if job is None or listed:
        raise JobError(_message(source, listed))
    return job


@dataclass
class _Overridden:
    """Plain data with overrides put in, and which override each key came from."""

    data: dict[str, Any]
    origin: dict[Keys, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def apply(self, text: str) -> None:
        key, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[^.\s]+(\.[^.\s]+)*", key.strip()):
            self.problems.append(f"--set {text}: expected KEY=VALUE, such as optimizer.lr=0.01")
            return
        try:
            self.put(tuple(key.strip().split(".")), yaml12.parse(value).value, f"--set {text}")
        except yaml12.YamlError as error:
            self.problems.append(f"--set {text}: {error}")

    def put(self, keys: Keys, value: Any, origin: str) -> None:
        section = self.data
        for depth, key in enumerate(keys[:-1], start=1):
            inner = section.get(key)
            if inner is not None and not isinstance(inner, Mapping):
                self.problems.append(
                    f"{origin}: {'.'.join(keys[:depth])} is a value, not a section, so nothing inside it can be set"
                )
                return
            section[key] = dict(inner or {})  # a copy: the caller's data stays as it is
            section = section[key]
        section[keys[-1]] = value
        self.origin[keys] = origin


def _where(keys: Keys, origin: Mapping[Keys, str], lines: Mapping[Keys, int]) -> str:
    path = ".".join(keys)
    for length in range(len(keys), 0, -1):
        if keys[:length] in origin:
            return f"{path} ({origin[keys[:length]]})"
        if keys[:length] in lines:
            return f"{path} (line {lines[keys[:length]]})"
    return path


def _message(source: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    return "\n  ".join([f"{source}: {len(problems)} problems", *problems])
