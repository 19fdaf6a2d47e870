"""A real Ray head with its job server, as `ray start --head` makes it on any machine, and a link to it that can be cut."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

TOKEN = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Head:
    """A running head.

    Attributes:
        url: of its job server.
        environment: for programs that talk to it; they send its token.
        process: all of its processes are this one's descendants.
    """

    url: str
    environment: dict[str, str]
    process: psutil.Process

    def names(self) -> list[str]:
        """What its processes are called; Ray names workers for what they run."""
        names = []
        for process in self.process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                names.append(process.name())
        return names


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    """A head of four CPUs that asks for a token, with ports of its own."""
    with tempfile.TemporaryDirectory(prefix="head-") as folder:
        token = Path(folder, "token")
        token.write_text(TOKEN)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        ports = iter(free_ports(5))
        port = next(ports)
        command = ["ray", "start", "--head", "--block", f"--temp-dir={folder}/r", "--num-cpus=4", "--disable-usage-stats"]
        command += [f"--dashboard-port={port}", "--min-worker-port=0", "--max-worker-port=0"]
        command += [
            f"--{name}={next(ports)}"
            for name in ("port", "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
        ]
        with Path(folder, "log").open("wb") as log:
            # Nothing here is worth draining for when the tests are over.
            own = {**environment, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
            process = subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: process.poll() is not None or _answers(url), 120)
            assert process.poll() is None, Path(folder, "log").read_text()
            yield Head(url, environment, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait(60)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in sockets]
    for server in sockets:
        server.close()
    return ports


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits until the condition holds."""
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.05)


def _answers(url: str) -> bool:
    request = urllib.request.Request(f"{url}/api/jobs/", headers={"Authorization": f"Bearer {TOKEN}"})
    with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request, timeout=2) as response:
        return bool(response.status == 200)
    return False


class Link:
    """A TCP proxy in front of a server. `cut` drops all connections, and new ones too until `mend`; `stall` stops passing on."""

    def __init__(self, url: str) -> None:
        self._target = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._up = True
        self._flowing = threading.Event()
        self._flowing.set()
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._up = False
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._open.clear()

    def mend(self) -> None:
        self._up = True

    def stall(self) -> None:
        self._flowing.clear()

    def close(self) -> None:
        self._flowing.set()
        self.cut()
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._server.accept()
                if not self._up:
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._flowing.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def link(head: Head) -> Iterator[Link]:
    link = Link(head.url)
    yield link
    link.close()
