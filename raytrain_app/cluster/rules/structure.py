"""The shape of a cluster file: what Ray's schema refuses, and the keys and limits that it lets pass."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema

from raytrain_app.cluster.document import ClusterFile, Finding, did_you_mean, section, shown, whole

# Ray 1.x had these at the top. `min_workers` is dropped without a word, the others are refused or ignored.
OLD_KEYS = {
    "min_workers": "belongs under available_node_types.<type>; here Ray drops it, and no worker starts",
    "initial_workers": "is no longer known; use available_node_types.<type>.min_workers",
    "head_node": "is of an old format that is ignored; describe the head under available_node_types, named in head_node_type",
    "worker_nodes": "is of an old format that is ignored; describe the workers under available_node_types",
    "worker_default_node_type": "is no longer known; leave it out",
    "autoscaling_mode": "is no longer known; use upscaling_speed",
    "target_utilization_fraction": "is no longer known; use upscaling_speed",
}
# What the GCP provider and the launcher read; the schema lets any key pass.
PROVIDER_KEYS = {
    "type",
    "region",
    "availability_zone",
    "project_id",
    "use_internal_ips",
    "use_external_head_ip",
    "cache_stopped_nodes",
    "gcp_credentials",
    "disable_node_updaters",
    "disable_launch_config_check",
    "foreground_node_launch",
}
PROVIDERS = ("aliyun", "aws", "azure", "external", "gcp", "kuberay", "local", "spark", "vsphere")
PROJECT_ID = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
PLACEHOLDERS = ("my-project", "your-project", "project-id")
CLUSTER_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
TYPES = {
    "object": "a section of keys and values",
    "integer": "a whole number",
    "number": "a number",
    "array": "a list",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}


def structure(file: ClusterFile) -> Iterator[Finding]:
    """All rules of this file."""
    yield from _old_keys(file)
    yield from _schema(file)
    yield from _provider(file)
    yield from _name(file)
    yield from _node_types(file)


def _old_keys(file: ClusterFile) -> Iterator[Finding]:
    for key in file.data.keys() & OLD_KEYS.keys():
        yield Finding(key, OLD_KEYS[key])


def _schema(file: ClusterFile) -> Iterator[Finding]:
    """All that `ray up` would refuse one by one."""
    for error in jsonschema.Draft7Validator(ray_schema()).iter_errors(file.data):
        path = ".".join(map(str, error.absolute_path))
        if error.validator == "additionalProperties":
            known = error.schema["properties"]
            for key in error.instance.keys() - known.keys() - (OLD_KEYS.keys() if not path else set()):
                yield Finding(
                    f"{path}.{key}" if path else str(key), f"is not a key that Ray knows{did_you_mean(str(key), known)}"
                )
        elif error.validator == "required":
            missing = error.message.split("'")[1]
            yield Finding(f"{path}.{missing}" if path else missing, "is missing; it must be given")
        elif error.validator == "type":
            kinds = [error.validator_value] if isinstance(error.validator_value, str) else error.validator_value
            yield Finding(path, f"found {shown(error.instance)}; expected {' or '.join(TYPES[kind] for kind in kinds)}")
        else:
            yield Finding(path, f"found {shown(error.instance)}; {error.message}")


def ray_schema() -> dict[str, Any]:
    """The schema that the installed Ray checks cluster files with."""
    spec = find_spec("ray")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations)))
    schema: dict[str, Any] = json.loads((folder / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8"))
    return schema


def _provider(file: ClusterFile) -> Iterator[Finding]:
    provider = section(file.data, "provider")
    kind = provider.get("type")
    if kind is not None and kind not in PROVIDERS:
        yield Finding("provider.type", f"found {kind}; expected gcp, or another of Ray's: {', '.join(PROVIDERS)}")
    if kind != "gcp":
        return
    for key in provider.keys() - PROVIDER_KEYS:
        yield Finding(f"provider.{key}", f"is not a key that Ray's GCP provider reads{did_you_mean(str(key), PROVIDER_KEYS)}")
    project, region, zone = (provider.get(key) for key in ("project_id", "region", "availability_zone"))
    if project is None or str(project) in PLACEHOLDERS:
        yield Finding("provider.project_id", f"found {project or 'nothing'}; put in your project's id (`gcloud projects list`)")
    elif not PROJECT_ID.fullmatch(str(project)):
        yield Finding("provider.project_id", f"found {project}; expected a project's id, not its name or number")
    if not region:
        yield Finding("provider.region", "is missing; expected a region such as us-west1")
    if not zone:
        yield Finding("provider.availability_zone", f"is missing; expected a zone such as {region or 'us-west1'}-a")
    elif region and not re.fullmatch(rf"{re.escape(str(region))}-[a-z]", str(zone)):
        yield Finding("provider.availability_zone", f"found {zone}; expected a zone of {region}, such as {region}-a")


def _name(file: ClusterFile) -> Iterator[Finding]:
    name = file.data.get("cluster_name")
    if section(file.data, "provider").get("type") == "gcp" and isinstance(name, str) and not CLUSTER_NAME.fullmatch(name):
        yield Finding(
            "cluster_name",
            f"found {name}; expected at most 40 lower-case letters, digits and '-', starting with a letter, "
            "since it becomes part of the machines' names and labels",
        )


def _node_types(file: ClusterFile) -> Iterator[Finding]:
    types = file.node_types
    if not types:
        yield Finding("available_node_types", "is missing; Ray would start its own default machines instead")
        return
    if not file.head_type:
        yield Finding("head_node_type", f"is missing; expected one of {', '.join(types)}")
    elif file.head_type not in types:
        yield Finding(
            "head_node_type", f"found {file.head_type}; expected one of {', '.join(types)}{did_you_mean(file.head_type, types)}"
        )
    if "max_workers" not in file.data:
        yield Finding("max_workers", "is missing; Ray's default is 2 workers in all", fatal=False)
    least = 0
    for name, node in types.items():
        yield from _limits(f"available_node_types.{name}", node, file, head=name == file.head_type)
        least += max(0, whole(node.get("min_workers"), 0))
    if least > file.max_workers:
        yield Finding("max_workers", f"found {file.max_workers}, but the types' min_workers add up to {least}")


def _limits(path: str, node: dict[str, Any], file: ClusterFile, head: bool) -> Iterator[Finding]:
    least, most = whole(node.get("min_workers"), 0), whole(node.get("max_workers"), 0 if head else file.max_workers)
    if least < 0 or most < 0:
        key = "min_workers" if least < 0 else "max_workers"
        yield Finding(f"{path}.{key}", f"found {min(least, most)}; expected at least 0")
    elif least > most:
        yield Finding(f"{path}.min_workers", f"found {least}, but max_workers is {most}")
    elif most > file.max_workers:
        yield Finding(f"{path}.max_workers", f"found {most}, but the cluster's max_workers is {file.max_workers}", fatal=False)
