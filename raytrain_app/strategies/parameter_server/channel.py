"""A worker's connection to one server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch

from raytrain_app.elastic.reduce import Layout
from raytrain_app.strategies.parameter_server.memory import Segment, bytes_of
from raytrain_app.strategies.parameter_server.outbox import Outbox, Sent
from raytrain_app.strategies.parameter_server.shard import Status
from raytrain_app.strategies.parameter_server.table import Place
from raytrain_app.strategies.parameter_server.wire import Buffer, Flag, Hello, Op, Peer, Reply, Request, connect


class Moved(Exception):
    """The ranges were cut anew; what was under way is to be asked again, of the servers of the newer table."""


class Channel:
    """The connection to one server, and the parameters that came over it last.

    Args:
        number: of the server; 0 is the lead.
        servers: how many there are.
        place: where it is; may be changed while there is no connection.
        worker: this worker's id.
        layout: of the flat vector.
        outbox: this worker's.
        local: use shared memory if the server is on this machine.

    Attributes:
        vector: parameters and float buffers of its range; they stay as they are until newer ones come.
        counters: integer buffers, from the lead alone.
        version: that of `vector`; -1 when there is none.
        durable: versions up to this one survive the server.
    """

    def __init__(self, number: int, servers: int, place: Place, worker: str, layout: Layout, outbox: Outbox, local: bool) -> None:
        self.number, self.place = number, place
        self.vector = torch.empty(0, dtype=layout.dtype)
        self.counters = torch.zeros(layout.num_counters if number == 0 else 0, dtype=torch.int64)
        self.version, self.durable = -1, 0
        self._servers, self._worker, self._layout, self._outbox, self._local = servers, worker, layout, outbox, local
        self._newest = 0
        self._peer: Peer | None = None
        self._mapped: dict[int, torch.Tensor] = {}
        self._lacking: Sequence[int] = ()

    @property
    def connected(self) -> bool:
        """Whether the server is there, as far as one can tell without asking it."""
        if self._peer is not None and not self._peer.is_open():
            self.close()
        return self._peer is not None

    def connect(self, table: int, holds: int) -> None:
        """Connects, and sends again what the server lacks, if it was restored from an earlier state.

        Args:
            table: number of the table that `place` is from.
            holds: the lease that this worker is at work on, -1 for none.

        Raises:
            OSError: the server is not there.
            Moved: it belongs to another table.
        """
        self.close()
        peer = self._peer = connect(self.place.address, self._local)
        kept = self._outbox.sent_to(self.number)
        hello = Hello(
            token=self.place.address.token,
            worker=self._worker,
            table=table,
            stride=self._outbox.stride,
            seen=self._newest,
            holds=holds,
            kept=[sent.lease for sent in kept],
            confirmed=[sent.lease for sent in kept if self._is_everywhere(sent)],
        )
        peer.ask(Request(Op.HELLO), [json.dumps(asdict(hello)).encode()], self._outbox.segment.fd if peer.local else -1)
        reply = self.answer()
        lacking = set(self._lacking)
        for sent in kept:
            if sent.lease in lacking:
                confirm = sent.lease if self._is_everywhere(sent) else -1
                self.ask(Request(Op.PUSH, Flag.REPLAY, confirm=confirm, missed=sent.missed[self.number]), sent)
                sent.acknowledged[self.number] = self.answer().included
        self.durable = reply.durable

    def ask(self, request: Request, sent: Sent | None = None) -> None:
        """Sends a request, with a push if there is one; `answer` comes next.

        Raises:
            OSError: the server is gone.
        """
        peer = self._require()
        request = request._replace(have=self.version)
        body: list[Buffer] = []
        if sent is not None:
            request = request._replace(
                lease=sent.lease, lr=sent.lr, loss=sent.loss, correct=sent.correct, rows=sent.rows, slot=sent.slot
            )
            if not peer.local:
                body.append(bytes_of(sent.vector[self.place.start : self.place.stop]))
            if self.number == 0:
                request = request._replace(extras=len(sent.extra))
                body += [sent.counters.numpy().tobytes(), np.array(sent.extra).tobytes(), np.array(sent.ids, np.int64).tobytes()]
        peer.ask(request, body)

    def answer(self) -> Reply:
        """Waits for the reply, and takes over the parameters that come with it.

        Raises:
            OSError: the server is gone.
            Moved: it does not hold its range any more.
        """
        peer = self._require()
        reply, fd = peer.answered()
        if fd >= 0:
            segment = Segment.open(fd)
            self._mapped[reply.buffer] = segment.tensor(self._layout.dtype)[: self.place.stop - self.place.start]
        if reply.status == Status.MOVED:
            raise Moved
        if reply.flags & Flag.PARAMETERS:
            self._take_over(peer, reply)
        elif reply.body_bytes:
            self._lacking = np.frombuffer(peer.read(reply.body_bytes), np.int64).tolist()
        self._newest = max(self._newest, reply.version)
        self.durable = max(self.durable, reply.durable)
        return reply

    def close(self) -> None:
        """Ends the connection, if there is one; the parameters stay."""
        if self._peer is not None:
            self._peer.close()
        self._peer = None
        self._lacking = ()
        self._mapped = {}  # the vector keeps its own memory; another server's buffers will be others

    def _is_everywhere(self, sent: Sent) -> bool:
        """Whether all servers have acknowledged a push."""
        return len(sent.acknowledged) == self._servers

    def _take_over(self, peer: Peer, reply: Reply) -> None:
        size = self.place.stop - self.place.start
        if reply.buffer >= 0:
            self.vector = self._mapped[reply.buffer]
        else:
            self.version = -1  # until all of it is there
            if self.vector.numel() != size or self._mapped:
                self.vector = torch.empty(size, dtype=self._layout.dtype)
            peer.read_into(bytes_of(self.vector))
        counters = np.frombuffer(peer.read(8 * len(self.counters)), np.int64)
        self.counters = torch.from_numpy(counters)
        self.version = reply.version

    def _require(self) -> Peer:
        if self._peer is None:
            raise ConnectionResetError("not connected")
        return self._peer
