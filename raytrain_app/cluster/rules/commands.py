"""What is run on the nodes: setup, versions, how Ray is started, and with which authentication."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from raytrain_app.cluster.document import ClusterFile, Finding, section

AUTH_MODE = "RAY_AUTH_MODE"
TOKEN_FILE = "~/.ray/auth_token"
RAY_PIN = re.compile(r"\bray(?:\[[^\]]*\])?==([0-9][0-9a-z.]*)")
RAY_IMAGE = re.compile(r"rayproject/ray(?:-ml)?:([0-9][0-9a-z.]*)(?:-py(3)([0-9]+))?")
PYTHON = re.compile(r"python(?:=|\s+|@)?(3\.[0-9]+)")
BARE_PIP = re.compile(r"(?:^|[;&|]\s*)(?:sudo\s+)?pip3?\s+install", re.MULTILINE)
SHORTEST_IDLE_MIN = 5
NEEDED_MODULES = {"googleapiclient": "google-api-python-client", "google_auth_httplib2": "google-auth-httplib2"}


def command_rules(file: ClusterFile) -> Iterator[Finding]:
    """All rules of this file."""
    gcp = section(file.data, "provider").get("type") == "gcp"
    if gcp:
        yield from _client_packages()
        yield from _defaults(file)
    yield from _versions(file)
    yield from _start(file)
    yield from _authentication(file)
    yield from _file_mounts(file)
    yield from _idle(file)


def _client_packages() -> Iterator[Finding]:
    missing = [package for module, package in NEEDED_MODULES.items() if find_spec(module) is None]
    if missing:
        yield Finding(
            "provider.type",
            f"`ray up` on GCP needs {' and '.join(missing)}, which are not installed here: pip install 'raytrain-app[gcp]'",
        )


def _defaults(file: ClusterFile) -> Iterator[Finding]:
    if "setup_commands" not in file.data and not section(file.data, "docker").get("image"):
        yield Finding("setup_commands", "is missing; Ray's default installs a Ray for Python 3.7 where there is none")
    if "head_setup_commands" not in file.data:
        yield Finding(
            "head_setup_commands",
            "is missing; Ray's default puts google-api-python-client 1.7.8 on the head; give [] if there is nothing to do",
            fatal=False,
        )
    if not section(file.data, "docker").get("image") and (found := BARE_PIP.search(setup(file))):
        yield Finding(
            "setup_commands",
            f"`{found[0].strip(';&| ')}` uses whichever Python the login shell finds; name it, such as ~/env/bin/python -m pip",
            fatal=False,
        )


def _versions(file: ClusterFile) -> Iterator[Finding]:
    """Ray and Python there and here: a job is refused when Ray differs, and pickled code may not load when Python does."""
    here, python_here = metadata.version("ray"), platform.python_version()
    docker = section(file.data, "docker")
    images = {key: str(docker[key]) for key in ("image", "head_image", "worker_image") if docker.get(key)}
    pins = [("setup_commands", version) for version in RAY_PIN.findall(setup(file))]
    pythons = [("setup_commands", version) for version in PYTHON.findall(setup(file))]
    for key, image in images.items():
        found = RAY_IMAGE.search(image)
        if found:
            pins.append((f"docker.{key}", found[1]))
            pythons += [(f"docker.{key}", f"{found[2]}.{found[3]}")] if found[2] else []
        elif ":" not in image.rpartition("/")[2] or re.search(":(latest|nightly)", image):
            yield Finding(
                f"docker.{key}",
                f"found {image}; expected an image of a fixed version, such as rayproject/ray:{here}",
                fatal=False,
            )
    for path, version in dict.fromkeys(pins):
        if version.split(".")[:2] != here.split(".")[:2]:
            yield Finding(path, f"installs Ray {version}, and here is Ray {here}; use the same on both sides")
        elif version != here:
            yield Finding(path, f"installs Ray {version}, and here is Ray {here}", fatal=False)
    for path, version in dict.fromkeys(pythons):
        if not python_here.startswith(f"{version}."):
            yield Finding(
                path, f"uses Python {version}, and here is Python {python_here}; use the same on both sides", fatal=False
            )
    if not pins and (file.data.get("setup_commands") or images):
        yield Finding(
            "setup_commands", f"does not fix the version of Ray; here is Ray {here}: install 'ray[default]=={here}'", fatal=False
        )


def _start(file: ClusterFile) -> Iterator[Finding]:
    head, worker = file.commands("head_start_ray_commands"), file.commands("worker_start_ray_commands")
    if head and "--autoscaling-config" not in head:
        yield Finding(
            "head_start_ray_commands",
            "expected --autoscaling-config=~/ray_bootstrap_config.yaml: without it no worker is ever started",
        )
    if worker and "RAY_HEAD_IP" not in worker:
        yield Finding(
            "worker_start_ray_commands", "expected --address=$RAY_HEAD_IP:6379: without it the workers do not find the head"
        )
    if "--block" not in worker:
        yield Finding(
            "worker_start_ray_commands",
            "`ray start` without --block: a node whose Ray died stays and is paid for, and one that shuts down does not drain",
            fatal=False,
        )
    if re.search(r"--(num-cpus|num-gpus|resources)\b", worker):
        yield Finding(
            "worker_start_ray_commands", "resources are given here as well; those under available_node_types count", fatal=False
        )


def _authentication(file: ClusterFile) -> Iterator[Finding]:
    """Without a word Ray decides by whether a token lies about, and then the two sides may differ."""
    modes = {key: _mode(file.commands(key)) for key in ("head_start_ray_commands", "worker_start_ray_commands")}
    for key, mode in modes.items():
        if mode is None:
            yield Finding(
                key,
                f"does not set {AUTH_MODE}, so a token that happens to be on a node decides whether the others are let in; "
                f"set it to token or disabled on head and workers",
                fatal=False,
            )
    if len({mode for mode in modes.values() if mode}) > 1:
        yield Finding(
            "worker_start_ray_commands",
            f"{AUTH_MODE} is {modes['worker_start_ray_commands']} here and {modes['head_start_ray_commands']} on the head, "
            "which would refuse the workers",
        )
    mounts = section(file.data, "file_mounts")
    if "token" in modes.values() and not any(str(target).endswith(".ray/auth_token") for target in mounts):
        yield Finding(
            "file_mounts", f"authentication is by token, but no token reaches the nodes; add {TOKEN_FILE}: {TOKEN_FILE}"
        )


def _mode(commands: str) -> str | None:
    found = re.search(rf"{AUTH_MODE}=([a-z]+)", commands)
    return found[1] if found else None


def _file_mounts(file: ClusterFile) -> Iterator[Finding]:
    in_container = bool(section(file.data, "docker").get("image"))
    for target, local in section(file.data, "file_mounts").items():
        path = f"file_mounts.{target}"
        if not os.path.exists(os.path.expanduser(str(local))):
            token = str(local).endswith(".ray/auth_token")
            advice = "`ray get-auth-token --generate` makes one" if token else "relative paths start in the current folder"
            yield Finding(
                path,
                f"{local} is not there; {advice}",
            )
        if in_container and str(target).startswith("/") and not str(target).startswith(("/home/", "/tmp/")):
            yield Finding(
                path, "with docker, files outside the home folder end up owned by root; use a folder below ~", fatal=False
            )


def _idle(file: ClusterFile) -> Iterator[Finding]:
    minutes: Any = file.data.get("idle_timeout_minutes", SHORTEST_IDLE_MIN)
    if isinstance(minutes, int | float) and minutes < SHORTEST_IDLE_MIN:
        yield Finding(
            "idle_timeout_minutes",
            f"found {minutes:g}; a node may be ended between two parts of a run, and starting one takes minutes; "
            f"use at least {SHORTEST_IDLE_MIN}",
            fatal=False,
        )


def setup(file: ClusterFile) -> str:
    """All commands that set the nodes up, those of single types among them, one a line."""
    keys = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    own = [str(command) for node in file.node_types.values() for key in keys for command in node.get(key) or []]
    return "\n".join([file.commands(*keys), *own])
