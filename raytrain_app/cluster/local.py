"""Several Ray nodes on this machine, each a process tree of its own that can be lost and replaced, for drills and tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import ray

from raytrain_app.errors import ClusterError

START_S = 60.0
TRIES = 3
"""How often a node is started anew whose start failed, such as over a port that something else was quicker to take."""


class LocalNodes:
    """A cluster on this machine: a head without CPUs for the driver, and nodes for the workers.

    Use it as a context; at its end all that it started is gone.

    Args:
        count: nodes for workers.
        resources: of each, by Ray's names.
    """

    def __init__(self, count: int, resources: Mapping[str, float]) -> None:
        self._resources = dict(resources)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0
        self._starting = threading.Lock()
        # Sockets lie in here, and their paths must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
        try:
            self.address = self._bring_up(self._start_head)
            for _ in range(count):
                self.add()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LocalNodes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add(self) -> str:
        """Starts a node and returns its name; it has joined then."""
        return self._bring_up(self._start_node)

    def remove(self, node_id: str) -> None:
        """Loses a node: its raylet is killed, and the workers on it end when they notice."""
        names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
        process = self._processes.pop(names[node_id])
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == "raylet":
                    child.kill()
        process.kill()
        process.wait()

    def close(self) -> None:
        """Ends all nodes and what they started."""
        for process in self._processes.values():
            self._end(process)
        self._processes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)  # a temporary folder that the system cleans up as well

    def _bring_up(self, start: Callable[[str], str]) -> str:
        """Starts a node, one at a time: two that look for free ports together may find the same, and one of them fails."""
        with self._starting:
            for _ in range(TRIES):
                name = f"node-{self._started}"
                self._started += 1
                found = start(name)
                if self._came_up(name):
                    return found
                self._end(self._processes.pop(name))
        said = (self._folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        raise ClusterError(f"a Ray node did not start on this machine: {said[-1] if said else 'it said nothing'}")

    def _start_head(self, name: str) -> str:
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        options = ["--head", f"--port={port}", "--num-cpus=0", "--num-gpus=0", "--include-dashboard=false"]
        self._start(name, [*options, f"--temp-dir={self._folder}"])
        return f"{ray.util.get_node_ip_address()}:{port}"

    def _start_node(self, name: str) -> str:
        others = {key: amount for key, amount in self._resources.items() if key not in ("CPU", "GPU")}
        options = [f"--address={self.address}", f"--num-cpus={self._resources.get('CPU', 0):g}"]
        options += [f"--num-gpus={self._resources.get('GPU', 0):g}"]
        if others:
            options.append(f"--resources={json.dumps(others)}")
        self._start(name, options)
        return name

    def _start(self, name: str, options: list[str]) -> None:
        ray_command = str(Path(sys.executable).with_name("ray"))
        command = [ray_command, "start", "--block", f"--node-name={name}", "--object-store-memory=200000000", *options]
        # `ray start` demands a token wherever one lies in the home folder, and a driver that connects sends none unless told to.
        environment = {"RAY_AUTH_MODE": "disabled", **os.environ}
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
            )

    def _came_up(self, name: str) -> bool:
        deadline_s, log = time.monotonic() + START_S, self._folder / f"{name}.log"
        while time.monotonic() < deadline_s and self._processes[name].poll() is None:
            if "Ray runtime started" in log.read_text(errors="replace"):
                return True
            time.sleep(0.1)
        return False

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """Ends a node's process and all that it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()
