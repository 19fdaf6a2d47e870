"""A machine's fields: names, kinds of value and choices, by the description of the Compute API that Google's client brings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytrain_app.cluster.document import ClusterFile, Finding, did_you_mean, section, shown
from raytrain_app.cluster.rules.machines import is_tpu

DESCRIPTION = Path("discovery_cache", "documents", "compute.v1.json")
OF_RAY = {"sourceInstanceTemplate", "networkConfig"}
"""What Ray takes out before it asks for a machine."""
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "object": ((dict,), "a section of keys and values"),
    "array": ((list,), "a list"),
    "boolean": ((bool,), "true or false"),
    "integer": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "string": ((str,), "text"),
}


def field_rules(file: ClusterFile) -> Iterator[Finding]:
    """Everything under node_config that Compute Engine would refuse, one request at a time; nothing without Google's client."""
    if section(file.data, "provider").get("type") != "gcp":
        return
    for name, node in file.node_types.items():
        config = section(node, "node_config")
        if not is_tpu(config):  # which are machines of another API
            ours = {key: value for key, value in config.items() if key not in OF_RAY}
            yield from instance_findings(ours, f"available_node_types.{name}.node_config")


def instance_findings(instance: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """What is wrong with the description of an instance, as `instances.insert` takes it."""
    if "Instance" in _schemas():
        yield from _object(path, instance, _schemas()["Instance"])


@cache
def _schemas() -> dict[str, Any]:
    spec = find_spec("googleapiclient")
    if spec is None or not spec.submodule_search_locations:
        return {}
    text = (Path(next(iter(spec.submodule_search_locations))) / DESCRIPTION).read_text(encoding="utf-8")
    schemas: dict[str, Any] = json.loads(text)["schemas"]
    return schemas


def _object(path: str, value: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[Finding]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for key, item in value.items():
        if key in known:
            yield from _value(f"{path}.{key}", item, known[key])
        elif others is not None:
            yield from _value(f"{path}.{key}", item, others)
        else:
            yield Finding(f"{path}.{key}", f"is not a field that Compute Engine knows here{did_you_mean(str(key), known)}")


def _value(path: str, value: Any, schema: Mapping[str, Any]) -> Iterator[Finding]:
    schema = _schemas()[schema["$ref"]] if "$ref" in schema else schema
    kind = schema.get("type", "any")
    if kind == "object" and isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        # Ray's own examples have it so, and Compute Engine takes it, against its own description.
        yield Finding(path, "is a list; Compute Engine's own form is one section of keys and values", fatal=False)
        for number, item in enumerate(value):
            yield from _object(f"{path}.{number}", item, schema)
    elif kind in KINDS and not _is(value, kind, schema):
        kind = "integer" if _is_long(schema) else kind
        quotes = "; put it in quotes" if kind == "string" and isinstance(value, bool | int | float) else ""
        yield Finding(path, f"found {shown(value)}; expected {KINDS[kind][1]}{quotes}")
    elif kind == "object":
        yield from _object(path, value, schema)
    elif kind == "array":
        for number, item in enumerate(value):
            yield from _value(f"{path}.{number}", item, schema["items"])
    elif "enum" in schema and value not in schema["enum"]:
        choices = [choice for choice in schema["enum"] if not choice.endswith("UNSPECIFIED")]
        yield Finding(path, f"found {value}; expected one of {', '.join(choices)}{did_you_mean(value, choices)}")


def _is(value: Any, kind: str, schema: Mapping[str, Any]) -> bool:
    """Whether the value is of the kind; whole numbers may be written as text."""
    if kind == "boolean" or isinstance(value, bool):
        return kind == "boolean" and isinstance(value, bool)
    if kind == "integer" or _is_long(schema):
        return isinstance(value, int) or (isinstance(value, str) and re.fullmatch(r"-?[0-9]+", value) is not None)
    return isinstance(value, KINDS[kind][0])


def _is_long(schema: Mapping[str, Any]) -> bool:
    """Whole numbers of 64 bits travel as text."""
    return schema.get("format") in ("int64", "uint64")
