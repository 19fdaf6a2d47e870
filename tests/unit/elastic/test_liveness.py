"""Who is known to be gone, and how soon."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from typing import Any

from raytrain_app.elastic.liveness import PROBE_S, is_alive
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
    assert not asyncio.run(asyncio.wait_for(is_alive(worker), PROBE_S / 2))


def test_a_worker_that_only_does_not_answer_counts_as_alive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        worker = WorkerInfo("0.0-a", 0, "node", 1, "127.0.0.1", there.getsockname()[1], Silent())
        assert asyncio.run(is_alive(worker))


def test_a_worker_ends_with_the_process_that_started_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "there\n"
    parent.kill()
    assert parent.communicate(timeout=60)[0] == "", "its output is closed once the worker has ended too"
