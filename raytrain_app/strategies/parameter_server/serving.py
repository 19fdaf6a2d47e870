"""A server on the network: takes connections, one thread each, and lets the desk answer."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from raytrain_app.strategies.parameter_server.desk import NOTHING_TOLD, Desk, HungUp, Told
from raytrain_app.strategies.parameter_server.memory import can_share
from raytrain_app.strategies.parameter_server.session import Session
from raytrain_app.strategies.parameter_server.shard import Push, Shard, Status
from raytrain_app.strategies.parameter_server.wire import Address, Flag, Hello, Op, Peer, Request, listen

HELLO_BYTES = 2**20
"""Longest introduction that is read."""


class Serving:
    """Sockets of one server.

    Args:
        desk: answers.
        host: address of this machine.
        failed: told of errors that are no lost connections.

    Attributes:
        address: where workers find it.
    """

    def __init__(self, desk: Desk, host: str, failed: Callable[[Exception], None]) -> None:
        self._desk, self._failed = desk, failed
        name = f"raytrain-{os.getpid()}-{secrets.token_hex(8)}"
        self._sockets = listen(host, name)
        port = self._sockets[0].getsockname()[1]
        unix = name if len(self._sockets) > 1 and can_share() else ""
        self.address = Address(host, port, unix, secrets.token_hex(16))
        for listening in self._sockets:
            threading.Thread(target=self._accept, args=(listening,), name="accept", daemon=True).start()

    def close(self) -> None:
        """Takes no more connections."""
        for listening in self._sockets:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it
            listening.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(Peer(connection),), name="session", daemon=True).start()

    def _serve(self, peer: Peer) -> None:
        session = None
        try:
            session = self._welcome(peer)
            while session is not None:
                request, _ = peer.asked()
                push, told = self._read_push(session, request) if request.op == Op.PUSH else (None, NOTHING_TOLD)
                answer = self._desk.answer(session, request, push, told)
                peer.answer(answer.reply, answer.body, answer.fd)
        except (OSError, HungUp):  # the worker is gone, or was hung up on
            pass
        except Exception as error:
            self._failed(error)
        finally:
            peer.close()
            if session is not None:
                self._desk.goodbye(session)

    def _welcome(self, peer: Peer) -> Session | None:
        """Lets the desk take a worker in, and tells it which of its pushes are lacking; None when it was sent away."""
        request, fd = peer.asked()
        if request.op != Op.HELLO or request.body_bytes > HELLO_BYTES:
            return None
        hello = Hello(**peer.read_json(request.body_bytes))
        if not secrets.compare_digest(hello.token, self.address.token):
            return None
        session = Session(peer, hello.worker)
        reply, lacking = self._desk.welcome(session, hello)
        if fd >= 0 and reply.status == Status.DONE:
            session.map_slots(fd, hello.stride, self._shard().versions.current.dtype)
        elif fd >= 0:
            os.close(fd)
        peer.answer(reply, [np.array(lacking, np.int64).tobytes()])
        return session if reply.status == Status.DONE else None

    def _read_push(self, session: Session, request: Request) -> tuple[Push, Told]:
        """The gradient, and what the lead is told beside it."""
        shard = self._shard()
        vector, read_bytes = session.read_vector(request.slot, shard.start, shard.stop, shard.versions.current.dtype)
        body = session.peer.read(request.body_bytes - read_bytes)
        scores, rest = 8 * len(shard.counters), 8 * (len(shard.counters) + request.extras)
        counters, extra, ids = (
            np.frombuffer(memoryview(body)[place], kind)
            for place, kind in ((slice(scores), np.int64), (slice(scores, rest), np.float64), (slice(rest, None), np.int64))
        )
        missed = request.missed if request.flags & Flag.REPLAY else None
        push = Push(request.lease, vector, torch.from_numpy(counters), request.base, request.lr, request.rows, missed)
        return push, Told(extra.tolist(), ids.tolist())

    def _shard(self) -> Shard:
        shard = self._desk.shard
        if shard is None:
            raise HungUp
        return shard
