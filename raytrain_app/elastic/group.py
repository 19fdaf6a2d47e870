"""The process group of one generation: made in place, torn down in place."""

from __future__ import annotations

import datetime
import ipaddress
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from raytrain_app.elastic.exchange import PeerLost, collective, disconnect, gather
from raytrain_app.elastic.roster import Generation
from raytrain_app.errors import ClusterError


@contextmanager
def peers_needed() -> Iterator[None]:
    """The same for a model that is spread over workers: the errors of its collectives come out of forward and backward."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error  # a pipeline wraps the errors of its stages
        while cause is not None:
            if isinstance(cause, dist.DistError) or "gloo" in str(cause):  # whose errors all name their place in its source
                raise PeerLost(str(cause)) from error
            cause = cause.__cause__
        raise


class Rendezvous:
    """A worker's store, opened once and kept; the members of a generation connect through that of their leader.

    The store picks a free port itself, so two runs on one node cannot collide.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.port: int = self.store.port


class Group:
    """torch.distributed's default process group, for one generation; gloo carries CPU tensors, NCCL those on GPUs.

    Every member makes it, connects, and closes it before it makes the next.

    Attributes:
        replica, num_replicas: which replica this member holds, or a part of, and of how many.
        place, peers: which part of it, and of how many.
        counterparts: the members that hold the same part of a replica, in the order of the replicas; None is all members.
        mates: the members that hold this member's replica together, by place; with parts.
        mesh: with parts, the members by replica and by part each way.
    """

    def __init__(
        self, generation: Generation, timeout_s: float, device: torch.device, parts: Mapping[str, int] | None = None
    ) -> None:
        """`timeout_s` bounds each collective and message; a dead peer shows at once, it is for those that hang.

        `parts` says into how many parts a replica is cut each way, by name; None where each member holds a whole one.
        """
        self.generation, self._timeout_s, self._parts = generation, timeout_s, parts
        self._before: set[Any] = set()
        self._connections: set[Any] | None = set()  # None is all that were not there before, while it connects
        self.rank, self.world_size, self.device = generation.rank, generation.world_size, device
        peers = math.prod(parts.values()) if parts is not None else 1
        self.replica, self.num_replicas = self.rank // peers, self.world_size // peers
        self.place, self.peers = self.rank % peers, peers
        self.counterparts: dist.ProcessGroup | None = None

    def connect(self, timeout_s: float) -> None:
        """Connects all members.

        Raises:
            PeerLost: a member did not come within `timeout_s`.
        """
        if self.world_size == 1 and self.device.type == "cpu":
            return
        generation, limit = self.generation, _seconds(timeout_s)
        self._before, self._connections = _connections(), None
        # torch names a group by how many there were; one that failed to connect is not taken off the count.
        dist.distributed_c10d._world.group_count = 0
        with collective():
            store = TCPStore(generation.host, generation.port, is_master=False, wait_for_workers=False, timeout=limit)
            dist.init_process_group(
                "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=PrefixStore(f"generation-{generation.number}", store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=limit,
            )
            dist.distributed_c10d._set_pg_timeout(_seconds(self._timeout_s))
            if self._parts is not None:
                self._connect_parts(self._parts, limit)
        self._connections = _connections() - self._before

    def _connect_parts(self, parts: Mapping[str, int], limit: datetime.timedelta) -> None:
        ranks = torch.arange(self.world_size).view(self.num_replicas, *parts.values())
        groups = [self._own_group(ranks.movedim(axis, -1).reshape(-1, size), limit) for axis, size in enumerate(ranks.shape)]
        self.mesh = DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=("replica", *parts))
        self.counterparts = groups[0]
        self.mates = self._own_group(ranks.view(self.num_replicas, self.peers), limit)

    def _own_group(self, rows: torch.Tensor, limit: datetime.timedelta) -> dist.ProcessGroup:
        """Makes the group of the row of ranks that this member is in.

        torch names groups that only their members make by ranks and order, so equal ones have equal names in all generations:
        DTensor remembers the names of a mesh and takes them for those of every mesh that is equal to it.
        """
        row = next(row for row in rows.tolist() if self.rank in row)
        mine: dist.ProcessGroup = dist.new_group(row, timeout=limit, use_local_synchronization=True)
        dist.distributed_c10d._set_pg_timeout(_seconds(self._timeout_s), mine)
        return mine

    def share(self, values: Sequence[float]) -> torch.Tensor:
        """All members' values, float64 (members, values), by rank."""
        return gather(torch.tensor(values, dtype=torch.float64))

    def part(self) -> None:
        """Waits until all members have what was sent to them, before `close`."""
        if self.world_size > 1:
            with suppress(PeerLost):
                gather(torch.zeros(1))

    def break_off(self) -> None:
        """Makes `connect` or the collective under way fail. For another thread, once a member is known to be lost.

        gloo has no call to end a collective, so its connections are shut. Should one of another part of this process have been
        opened just when this group connected, that part sees a short failure of its network.
        """
        now = _connections()
        for connection in now - self._before if self._connections is None else now & self._connections:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as mine:
                mine.shutdown(socket.SHUT_RDWR)

    def gather_ints(self, values: Sequence[int], most: int) -> list[int]:
        """All members' values, in rank order; non-negative, at most `most` a member."""
        if self.world_size == 1:
            return list(values)
        padded = torch.full((most,), -1, dtype=torch.int64)
        padded[: len(values)] = torch.tensor(values, dtype=torch.int64)
        return [value for value in gather(padded).flatten().tolist() if value >= 0]

    def close(self) -> None:
        """Leaves the group. Peers that still wait for this member get an error at once."""
        if self._parts is not None:  # a model in parts holds on to its groups, which would keep their connections open
            self.break_off()
        self._connections = set()
        disconnect()


def choose_interface(node_ip: str) -> str:
    """Name of the network interface that has `node_ip`, for gloo and NCCL, which else may pick a wrong one.

    Raises:
        ClusterError: no interface has the address, or GLOO_SOCKET_IFNAME is set to one that does not exist.
    """
    addresses = {name: [a.address for a in found] for name, found in psutil.net_if_addrs().items()}
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")
    if wanted and wanted not in addresses:
        raise ClusterError(
            f"GLOO_SOCKET_IFNAME is {wanted!r}, which is no network interface of {socket.gethostname()}; "
            f"it takes one of {', '.join(sorted(addresses))}, or unset it"
        )
    if wanted:
        return wanted
    for name, found in addresses.items():
        if node_ip in found:
            return name
    if ipaddress.ip_address(node_ip).is_loopback:
        return "lo"
    raise ClusterError(
        f"no network interface of {socket.gethostname()} has the address {node_ip} under which Ray knows this node"
    )


def _connections() -> set[Any]:
    """This process's TCP connections as psutil tells of them: file descriptor, both ends, status."""
    return {found for found in psutil.Process().net_connections("tcp") if found.status == psutil.CONN_ESTABLISHED}


def _seconds(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
