"""All benchmarks in one go, as a page: the machine, the versions, the date, and each command with what it printed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import psutil

COMMANDS: dict[str, tuple[str, ...]] = {
    "A step, against DistributedDataParallel": (
        "step --model cnn",
        "step --model mlp --steps 100",
        "step --model cnn --workers 1",
    ),
    "A step, by parameters": ("step --sizes --steps 10 --rounds 7",),
    "From the command to the first step, against stock Ray Train": ("start",),
    "Checkpoints, against stock Ray Train": ("checkpoint",),
    "Lost and added workers, against stock Ray Train": ("elastic --repeats 3",),
    "Reading, against Ray Data": ("ingest",),
    "Parameter servers, against one plain actor": ("ps --no-accuracy",),
}
"""What is run, by the heading above it. The commands are `raytrain bench ...`."""
PACKAGES = ("raytrain-app", "ray", "torch", "tensorflow", "keras", "numpy")


def make_page(tell: Callable[[str], None], only: Sequence[str] = ()) -> Iterator[str]:
    """Runs all commands and gives the page as Markdown, each part as soon as it is there.

    Args:
        tell: told of progress.
        only: first words of the commands to run; without any, all.
    """
    yield _heading()
    for heading, commands in COMMANDS.items():
        chosen = [command for command in commands if not only or command.split()[0] in only]
        if chosen:
            yield f"\n## {heading}"
        for command in chosen:
            yield f"\n{_section(command, tell)}"


def _heading() -> str:
    memory_gib = psutil.virtual_memory().total / 2**30
    versions = ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name)))
    return (
        "# Benchmarks\n\n"
        "Made by `make bench`. Ratios tell more than times: what is compared ran in turn on the same machine, whatever else went "
        "on there.\n\n"
        f"- Machine: {_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()}\n"
        f"- Versions: Python {platform.python_version()}, {versions}\n"
        f"- Date: {time.strftime('%Y-%m-%d')}"
    )


def _section(command: str, tell: Callable[[str], None]) -> str:
    """A command and its output, or the last lines of its errors."""
    tell(f"raytrain bench {command}")
    done = subprocess.run(
        [sys.executable, "-m", "raytrain_app", "bench", *shlex.split(command)], capture_output=True, text=True, check=False
    )
    output = done.stdout if done.returncode == 0 else f"failed: {done.stderr.strip()[-500:]}"
    return f"```\n$ raytrain bench {command}\n{output.rstrip()}\n```"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # an extra that is not installed
        return None


def _processor() -> str:
    from raytrain_app.strategies.worker import cpu_model

    return cpu_model()
