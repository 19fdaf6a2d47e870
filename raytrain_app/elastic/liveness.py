"""What became of workers that are not heard of: asks Ray, which knows of processes at once but not of nodes, and the machines.

A machine whose processes are slow or stopped still answers: its kernel takes or refuses connections. One that answers nothing at
all is gone, or cut off, which comes to the same for its peers.
"""

from __future__ import annotations

import asyncio
import enum
import os
import select
import threading
from collections.abc import Collection
from contextlib import suppress

from ray.exceptions import ActorUnavailableError, RayActorError

from raytrain_app.actors import Actor
from raytrain_app.cluster.nodes import Node, living_nodes
from raytrain_app.elastic.roster import WorkerInfo

PROBE_S = 1.0
"""Longest wait for the answer to one question."""
TRIES = 2
"""How often a machine that did not answer is asked again, since packets get lost."""


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


class Fate(enum.Enum):
    """What became of a worker."""

    ALIVE = "alive"  # or it cannot be told
    DIED = "died"
    LOST = "lost"  # with its node


async def fate(info: WorkerInfo) -> Fate:
    """What became of a worker; takes up to about two seconds where nothing answers."""
    lives = await _lives(info)
    if lives:
        return Fate.ALIVE
    node = next((node for node in await asyncio.to_thread(living_nodes) if node.node_id == info.node_id), None)
    if node is None or await _is_gone(node, info.port):
        return Fate.LOST
    return Fate.ALIVE if lives is None else Fate.DIED


async def nodes_still_gone(node_ids: Collection[str]) -> set[str]:
    """Those of the nodes that Ray still takes for alive although their raylets do not answer."""
    if not node_ids:
        return set()
    nodes = [node for node in await asyncio.to_thread(living_nodes) if node.node_id in node_ids]
    found = await asyncio.gather(*(_is_open(node.host, node.port) for node in nodes))
    return {node.node_id for node, is_open in zip(nodes, found, strict=True) if not is_open}


async def _lives(info: WorkerInfo) -> bool | None:
    """Whether a worker's process lives; None if nobody can tell.

    One bad answer is enough: on a node that is gone Ray has none for a while, and the port is closed.
    """
    questions = [asyncio.ensure_future(question) for question in (_is_open(info.host, info.port), _ray_has(info.handle))]
    found = None
    try:
        for answer in asyncio.as_completed(questions):
            said = await answer
            if said is False:
                return False
            found = found or said
        return found
    finally:
        for question in questions:
            question.cancel()


async def _is_gone(node: Node, port: int) -> bool:
    """Whether a node's raylet has ended, or nothing on its machine answers, neither the raylet's port nor the other one."""
    for _ in range(TRIES):
        raylet, other = await asyncio.gather(*(_is_open(node.host, number, PROBE_S / TRIES) for number in (node.port, port)))
        if raylet is not None or other is not None:
            return raylet is False
    return True


async def _ray_has(handle: Actor) -> bool | None:
    """Whether Ray has the actor; None if it cannot tell now."""
    try:
        await asyncio.wait_for(handle.__ray_ready__.remote(), PROBE_S)
    except RayActorError as error:
        return None if isinstance(error, ActorUnavailableError) else False
    except asyncio.TimeoutError:
        return None
    return True


async def _is_open(host: str, port: int, timeout_s: float = PROBE_S) -> bool | None:
    """Whether a process listens there; None if nothing answers."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout_s)
    except ConnectionRefusedError:
        return False
    except (OSError, asyncio.TimeoutError):
        return None
    writer.close()
    return True
