"""What workers and servers say to each other: fixed frames over a socket, data in shared memory or behind the frame.

Control of the run goes through Ray; only the exchange of gradients, parameters and leases takes this way, because a call of
an actor costs half a millisecond. On one machine a server is reached through a Unix socket, over which both sides hand each
other shared memory; from elsewhere through TCP. Frames are fixed structs and JSON: nothing that is received is executed.
"""

from __future__ import annotations

import array
import contextlib
import enum
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Buffer = bytes | bytearray | memoryview

CONNECT_S = 5.0
"""How long a connection may take to be made."""
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}
"""A peer whose machine vanished without a word is given up after 11 s (the last one is in ms: data it does not take)."""


class Op(enum.IntEnum):
    """What a worker asks for."""

    HELLO = 1  # say who it is; the body is JSON
    PUSH = 2  # apply a gradient, and perhaps answer with parameters and the next lease
    PULL = 3  # parameters
    TAKE = 4  # a lease, and parameters


class Flag(enum.IntFlag):
    """What a frame says beside its numbers."""

    WANT_PARAMETERS = 1
    WANT_LEASE = 2
    REPLAY = 4  # of a push that was accepted before
    PARAMETERS = 8  # they come with this reply
    SEGMENT = 16  # so does the file of the shared memory they are in
    BEYOND = 32  # with a request for a lease: the last one, `lease`, cannot be computed, as some server is at version `base`


class Request(NamedTuple):
    """A worker's frame.

    Attributes:
        op: what for.
        flags: `Flag`.
        slot: place of the gradient in the worker's shared memory; -1 when it is in the body.
        lease: that is pushed.
        base: version of the parameters that the gradient was computed at.
        have: version that the worker has; it need not be sent again.
        exactly: the version to wait for, and the only one of use; -1 for any.
        confirm: a lease that all servers have applied; -1 for none.
        returned: a lease that a server has refused; -1 for none.
        missed: with a replay, the updates that the gradient had missed when it was applied first.
        lr, loss, correct, rows: of the push, see `shard.Push` and `ledger.Outcome`.
        extras: how many scores more than those come in the body.
        body_bytes: what follows the frame.
    """

    op: int
    flags: int = 0
    slot: int = -1
    lease: int = -1
    base: int = -1
    have: int = -1
    exactly: int = -1
    confirm: int = -1
    returned: int = -1
    missed: int = 0
    lr: float = 0.0
    loss: float = 0.0
    correct: float = 0.0
    rows: int = 0
    extras: int = 0
    body_bytes: int = 0


class Reply(NamedTuple):
    """A server's frame.

    Attributes:
        status: `shard.Status`.
        flags: `Flag`.
        buffer: which of the server's shared buffers the parameters are in; -1 when they are in the body. They stay as they
            are until the next request on this connection has been received.
        version: of the server, and of the parameters if there are any.
        lease: the next one, or `ledger.WAIT` or `ledger.END`.
        durable: versions up to this one survive the server.
        included: the version that has the push in it; in bulk mode it may be yet to come.
        staleness: of the push.
        body_bytes: what follows the frame.
    """

    status: int = 0
    flags: int = 0
    buffer: int = -1
    version: int = 0
    lease: int = -1
    durable: int = 0
    included: int = 0
    staleness: int = 0
    body_bytes: int = 0


_REQUEST = struct.Struct("<BBxxiqqqqqqqdddqqQ")
_REPLY = struct.Struct("<BBxxiqqqqqQ")


@dataclass(frozen=True)
class Hello:
    """How a worker introduces itself.

    Attributes:
        token: that the server wants to see.
        worker: its id.
        table: number of the table by which it found the server.
        stride: elements from one gradient to the next in its shared memory.
        seen: the highest version of the server's range that it has heard of.
        holds: the lease that it is at work on, -1 for none.
        kept: leases that it has pushed here and would push again.
        confirmed: those of them that all servers have acknowledged.
    """

    token: str
    worker: str
    table: int
    stride: int
    seen: int
    holds: int
    kept: list[int]
    confirmed: list[int]


@dataclass(frozen=True)
class Address:
    """Where a server listens.

    Attributes:
        host, port: for TCP.
        unix: name of the Unix socket in Linux's abstract namespace, empty where there is none.
        token: what a worker must show; it learns it through Ray.
    """

    host: str
    port: int
    unix: str
    token: str


class Peer:
    """One end of a connection. One thread at a time may use it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.local = connection.family == socket.AF_UNIX
        connection.settimeout(None)
        if not self.local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):  # they differ between systems
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def ask(self, request: Request, body: Sequence[Buffer] = (), fd: int = -1) -> None:
        """Sends a request; the body's parts follow the frame."""
        request = request._replace(body_bytes=sum(map(_size, body)))
        self._send(_REQUEST.pack(*request), body, fd)

    def answer(self, reply: Reply, body: Sequence[Buffer] = (), fd: int = -1) -> None:
        """Sends a reply."""
        reply = reply._replace(body_bytes=sum(map(_size, body)))
        self._send(_REPLY.pack(*reply), body, fd)

    def asked(self) -> tuple[Request, int]:
        """Waits for a request; returns its frame and the file that came with it, else -1. The body is still to be read."""
        frame, fd = self._receive_frame(_REQUEST.size)
        return Request(*_REQUEST.unpack(frame)), fd

    def answered(self) -> tuple[Reply, int]:
        """Waits for a reply; returns its frame and the file that came with it, else -1. The body is still to be read."""
        frame, fd = self._receive_frame(_REPLY.size)
        return Reply(*_REPLY.unpack(frame)), fd

    def read(self, size_bytes: int) -> bytearray:
        """The next bytes."""
        data = bytearray(size_bytes)
        self.read_into(memoryview(data))
        return data

    def read_json(self, size_bytes: int) -> Any:
        """The next bytes as JSON."""
        return json.loads(bytes(self.read(size_bytes)))

    def read_into(self, buffer: memoryview) -> None:
        """Fills a buffer of bytes."""
        got = 0
        while got < len(buffer):
            size = self._socket.recv_into(buffer[got:])
            if size == 0:
                raise ConnectionResetError("the other side closed the connection")
            got += size

    def is_open(self) -> bool:
        """Whether the other side has not closed the connection; nothing may be under way."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Ends the connection, also for a thread that waits on it."""
        with contextlib.suppress(OSError):  # the other side may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, frame: bytes, body: Sequence[Buffer], fd: int) -> None:
        parts = [memoryview(part).cast("B") for part in (frame, *body) if _size(part)]
        files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        sent = self._socket.sendmsg(parts, files)
        for part in parts:
            if sent < len(part):
                self._socket.sendall(part[sent:])
            sent = max(0, sent - len(part))

    def _receive_frame(self, size_bytes: int) -> tuple[bytearray, int]:
        frame = bytearray(size_bytes)
        if not self.local:
            self.read_into(memoryview(frame))
            return frame, -1
        size, files, _, _ = self._socket.recvmsg_into([frame], socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if size == 0:
            raise ConnectionResetError("the other side closed the connection")
        self.read_into(memoryview(frame)[size:])
        fds = array.array("i")
        for _, _, data in files:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return frame, fds[0] if fds else -1


def listen(host: str, name: str) -> list[socket.socket]:
    """Sockets that take connections: TCP at `host` on a free port, and where the system has them a Unix socket `name`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets = [socket.create_server((host, 0), family=family, backlog=1024)]
    if has_abstract_sockets():
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(f"\0{name}")
        unix.listen(1024)
        sockets.append(unix)
    return sockets


def connect(address: Address, local: bool = True) -> Peer:
    """Connects to a server, through shared memory if it is on this machine and `local` allows.

    Raises:
        OSError: it is not there.
    """
    if local and address.unix and has_abstract_sockets():
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            unix.connect(f"\0{address.unix}")
            return Peer(unix)
        except ConnectionRefusedError:  # no such name here: another machine, or the server is gone
            unix.close()
    return Peer(socket.create_connection((address.host, address.port), CONNECT_S))


def has_abstract_sockets() -> bool:
    """Whether Unix sockets can have names that are no files (Linux)."""
    return hasattr(socket, "AF_UNIX") and hasattr(socket, "SCM_RIGHTS") and hasattr(socket, "SO_PEERCRED")


def _size(part: Buffer) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)
