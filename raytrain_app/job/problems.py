"""What is wrong with a job, as sentences: the key, the value found, what is allowed, and the nearest known key."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from raytrain_app.job.model import Job

Keys = tuple[str, ...]
TAGGED = tuple(name for name, field in Job.model_fields.items() if field.discriminator)
REQUIRED = {("name",): "job", ("task",): "task", ("model",): {"name": "model"}, ("model", "name"): "model"}

SECTION = "a section of keys and values"
EXPECTED = {
    "bool_type": "true or false",
    "dict_type": SECTION,
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "a number above {gt:.10g}",
    "greater_than_equal": "at least {ge:.10g}",
    "int_type": "a whole number",
    "less_than": "a number below {lt:.10g}",
    "less_than_equal": "at most {le:.10g}",
    "model_attributes_type": SECTION,
    "model_type": SECTION,
    "string_type": "text (put it in quotes if it looks like a number)",
}


def find_problems(raw: Mapping[str, Any]) -> tuple[Job | None, list[tuple[Keys, str]]]:
    """Validates `raw`.

    A wrong value is reported, replaced by its default, and validation goes on, so that rules about several keys are
    checked too wherever the keys they are about are right.

    Returns:
        The job and no problems, or None and every problem as (keys, sentence).
    """
    data, problems, wrong = _copy(raw), dict[tuple[Keys, str], None](), set[Keys]()
    while True:
        try:
            job = Job.model_validate(data)
            return (None if problems else job), list(problems)
        except ValidationError as error:
            details = error.errors(include_url=False)
        already_wrong = set(wrong)
        for detail in details:
            if detail["type"] == "rules":
                problems.update(dict.fromkeys(_broken_rules(detail["ctx"]["broken"], wrong)))
                continue
            keys = _keys(detail["loc"], detail["type"])
            if keys not in wrong:
                problems[keys, _sentence(keys, detail, raw)] = None
            wrong.add(keys)
            _mend(data, keys)
        if wrong == already_wrong:  # nothing is left to mend
            return None, list(problems)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return value


def _keys(loc: tuple[int | str, ...], kind: str) -> Keys:
    """The path in the file: pydantic's without the name of the variant, with the variant's key where that one is wrong."""
    keys = tuple(str(part) for part in loc)
    if keys and keys[0] in TAGGED:
        keys = keys[:1] + keys[2:] if not kind.startswith("union_tag") else (keys[0], "name")
    return keys


def _mend(data: dict[str, Any], keys: Keys) -> None:
    """Replaces what is wrong by something right; where it is part of a list, the whole list goes."""
    *parents, last = keys
    section = data
    for key in parents:
        if not isinstance(section.get(key), dict):
            last = key
            break
        section = section[key]
    if keys in REQUIRED:
        section[last] = REQUIRED[keys]
    elif last == "name" and keys[0] in TAGGED:  # the variant that has most of the keys given, to check those too
        variants = _variants(keys[0])
        section[last] = max(variants, key=lambda name: len(section.keys() & variants[name].model_fields.keys()))
    else:
        section.pop(last, None)


def _broken_rules(broken: list[Any], wrong: set[Keys]) -> Iterator[tuple[Keys, str]]:
    for rule in broken:
        involved = [tuple(path.split(".")) for path in (rule.path, *rule.others)]
        if not any(keys[: len(bad)] == bad for keys in involved for bad in wrong):
            yield involved[0], rule.text


def _sentence(keys: Keys, detail: Any, raw: Mapping[str, Any]) -> str:
    kind, ctx = str(detail["type"]), detail.get("ctx", {})
    found = f"found {_show(detail['input'])}; expected "
    if kind == "extra_forbidden":
        return f"unknown key; {_nearest_key(keys, raw)}"
    if kind == "missing":
        return "is missing; it must be given"
    if kind == "union_tag_invalid":
        value = detail["input"]["name"]
        return f"found {_show(value)}; expected {_listed(_variants(keys[0]))}{_did_you_mean(value, _variants(keys[0]))}"
    if kind == "literal_error":
        allowed = str(ctx["expected"]).replace("'", "")
        return found + allowed + _did_you_mean(detail["input"], allowed.replace(" or ", ", ").split(", "))
    if kind in EXPECTED:
        example = ", such as {name: ...}" if EXPECTED[kind] == SECTION and keys[-1] in ("model", *TAGGED) else ""
        return found + EXPECTED[kind].format(**ctx) + example
    return f"{found}{detail['msg']}"


def _nearest_key(keys: Keys, raw: Mapping[str, Any]) -> str:
    section = _section(keys[:-1], raw)
    known = list(section.model_fields) if section else []
    in_variants = [name for name, kind in (_variants(keys[0]) if len(keys) == 2 else {}).items() if keys[-1] in kind.model_fields]
    elsewhere = [path for path in _all_paths(Job) if path.rpartition(".")[2] == keys[-1]]
    if in_variants:
        return f"it belongs to {keys[0]} {_listed(in_variants)}; expected {', '.join(known)}"
    hint = _did_you_mean(keys[-1], known) or (f"; did you mean {elsewhere[0]}?" if elsewhere else "")
    return f"expected {', '.join(known)}{hint}"


def _section(keys: Keys, raw: Mapping[str, Any]) -> type[BaseModel] | None:
    """The model class at `keys`; for a union the variant that `raw` names, else the first."""
    section: type[BaseModel] | None = Job
    for key in keys:
        if section is None or key not in section.model_fields:
            return None
        variants = _variants(key) if section is Job else {}
        chosen = raw.get(key)
        named = chosen.get("name") if isinstance(chosen, Mapping) else None
        section = variants.get(str(named)) or next(_models(section.model_fields[key].annotation), None)
    return section


def _variants(key: str) -> dict[str, type[BaseModel]]:
    if key not in TAGGED:
        return {}
    return {str(get_args(kind.model_fields["name"].annotation)[0]): kind for kind in _models(Job.model_fields[key].annotation)}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _all_paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in _models(field.annotation):
            yield from _all_paths(inner, f"{prefix}{name}.")


def _did_you_mean(value: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(value).lower(), list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def _listed(names: Any) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else str(last)


def _show(value: Any) -> str:
    """The value much as YAML writes it, shortened and without secrets."""
    shown = re.sub(r"//[^/@]*@", "//***@", json.dumps(value, default=str, ensure_ascii=False))
    return shown if len(shown) <= 60 else shown[:57] + "..."
