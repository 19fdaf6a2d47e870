"""Whether workers and nodes are there. Ray is asked, which knows of a dead process at once but not of a node, and so are they."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from contextlib import suppress

from ray.exceptions import ActorUnavailableError, RayActorError

from raytrain_app.actors import Actor
from raytrain_app.cluster.nodes import living_nodes, raylet_is_gone
from raytrain_app.elastic.roster import WorkerInfo

PROBE_S = 1.0
"""Longest wait for the answer to one question."""


def end_with_raylet() -> None:
    """Ends this process as soon as the one that started it, its node's raylet, has ended.

    Ray ends it too, but a second or two later, and until then it would train on with the others as if its node were there.
    """
    with suppress(AttributeError, OSError):  # not Linux, or a container that forbids it: then Ray's way has to do
        raylet = os.pidfd_open(os.getppid())
        threading.Thread(target=_end_after, args=(raylet,), name="raylet", daemon=True).start()


def _end_after(process: int) -> None:
    ended = select.poll()
    ended.register(process, select.POLLIN)
    ended.poll()
    os._exit(1)


async def is_alive(info: WorkerInfo) -> bool:
    """Whether a worker's process lives; one that cannot be told counts as alive."""
    questions = [asyncio.ensure_future(question) for question in (_port_is_open(info.host, info.port), _ray_has(info.handle))]
    try:
        # One bad answer is enough: on a node that is gone Ray has none for a while, and the port is closed.
        for answer in asyncio.as_completed(questions):
            if await answer is False:
                return False
        return True
    finally:
        for question in questions:
            question.cancel()


async def node_is_gone(node_id: str) -> bool:
    """Whether a node is gone, by Ray's word or since its raylet has ended."""
    node = next((node for node in await asyncio.to_thread(living_nodes) if node.node_id == node_id), None)
    return node is None or await asyncio.to_thread(raylet_is_gone, node)


async def _ray_has(handle: Actor) -> bool | None:
    """Whether Ray has the actor; None if it cannot tell now."""
    try:
        await asyncio.wait_for(handle.__ray_ready__.remote(), PROBE_S)
    except RayActorError as error:
        return None if isinstance(error, ActorUnavailableError) else False
    except asyncio.TimeoutError:
        return None
    return True


async def _port_is_open(host: str, port: int) -> bool | None:
    """Whether a process listens there; None if nothing answers, as when a machine has vanished."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PROBE_S)
    except ConnectionRefusedError:
        return False
    except (OSError, asyncio.TimeoutError):
        return None
    writer.close()
    return True
