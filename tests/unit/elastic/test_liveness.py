"""Who is known to be gone, and how soon."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from raytrain_app.cluster.nodes import Node
from raytrain_app.elastic.liveness import PROBE_S, _is_gone, _lives
from raytrain_app.elastic.roster import WorkerInfo

CHILD = (
    "import time; from raytrain_app.elastic.liveness import end_with_raylet; end_with_raylet(); print('there'); time.sleep(600)"
)
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-u', '-c', {CHILD!r}])"


class Silent:
    """A handle of a worker on a node of which Ray does not know yet that it is gone: calls are not answered."""

    @property
    def __ray_ready__(self) -> Silent:
        return self

    def remote(self) -> Any:
        return asyncio.sleep(600)


def test_a_closed_port_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    worker = WorkerInfo("0.0-a", 0, "node", 1, "127.0.0.1", port, Silent())
    assert asyncio.run(asyncio.wait_for(_lives(worker), PROBE_S / 2)) is False


def test_a_worker_that_only_does_not_answer_counts_as_alive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        worker = WorkerInfo("0.0-a", 0, "node", 1, "127.0.0.1", there.getsockname()[1], Silent())
        assert asyncio.run(_lives(worker))


def test_a_worker_ends_with_the_process_that_started_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "there\n"
    parent.kill()
    assert parent.communicate(timeout=60)[0] == "", "its output is closed once the worker has ended too"


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    """A port that takes connections, one that refuses them, and one where nothing answers."""
    with ExitStack() as stack:
        taking = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        refusing = socket.create_server(("127.0.0.1", 0))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):  # nobody takes these, and to more of them the kernel does not answer
            client = stack.enter_context(socket.socket())
            client.settimeout(0.1)
            with suppress(TimeoutError):
                client.connect(silent.getsockname())
        found = {"taking": taking, "refusing": refusing, "silent": silent}
        numbers = {name: int(server.getsockname()[1]) for name, server in found.items()}
        refusing.close()
        yield numbers


@pytest.mark.parametrize(
    ("raylet", "worker", "gone"),
    [
        ("taking", "silent", False),
        ("taking", "refusing", False),
        ("refusing", "taking", True),  # Ray has ended there, and the worker will in a moment
        ("silent", "taking", False),  # the machine is only busy
        ("silent", "refusing", False),
        ("silent", "silent", True),
    ],
)
def test_a_node_is_gone_with_its_raylet_or_its_machine(ports: dict[str, int], raylet: str, worker: str, gone: bool) -> None:
    node = Node("a", "127.0.0.1", {}, port=ports[raylet])
    assert asyncio.run(_is_gone(node, ports[worker])) is gone
