"""Which server has which range, and where it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raytrain_app.strategies.parameter_server.wire import Address


@dataclass(frozen=True)
class Place:
    """One server.

    Attributes:
        start, stop: its elements of the flat vector.
        address: where it listens.
        handle: of its actor.
        pid, node_id: of its process.
    """

    start: int
    stop: int
    address: Address
    handle: Any = field(default=None, compare=False)
    pid: int = 0
    node_id: str = ""


FIRST_TABLE = 1


@dataclass(frozen=True)
class Table:
    """All servers, the lead first.

    Attributes:
        number: counts up when ranges are cut anew or all servers go back; a server that is only restarted keeps it.
        places: one a server.
    """

    number: int
    places: tuple[Place, ...]
