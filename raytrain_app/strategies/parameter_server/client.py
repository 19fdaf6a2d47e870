"""A worker's end of the data path: leases in, gradients out, parameters in; the same through every restart of a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from raytrain_app.elastic.reduce import Layout
from raytrain_app.strategies.parameter_server.channel import Channel, Moved
from raytrain_app.strategies.parameter_server.ledger import WAIT
from raytrain_app.strategies.parameter_server.outbox import Outbox, Sent
from raytrain_app.strategies.parameter_server.shard import Status
from raytrain_app.strategies.parameter_server.table import Table
from raytrain_app.strategies.parameter_server.wire import Flag, Op, Reply, Request

RETRY_S = 0.05
"""Pause before a server that is being started is tried again."""

Result = TypeVar("Result")

Source = Callable[[Table | None], Table | None]
"""Where the servers are. Called with the table that did not work, it waits a moment for another; None without."""


@dataclass
class Answer:
    """What became of a push.

    Attributes:
        refused: some server found it too old; its lease has been given back.
        lease: the next one, `ledger.WAIT` or `ledger.END`.
        staleness: updates that it missed, at the lead.
    """

    refused: bool
    lease: int
    staleness: int


class Client:
    """One worker's connections to all servers. Not for several threads.

    It keeps what it pushed until the servers have it safely, sends it again to a restored server that lacks it, and repeats
    what was under way; the servers see to it that nothing counts twice.

    Args:
        source: where the servers are.
        worker: this worker's id.
        layout: of the flat vector.
        parts: in bulk mode, leases of a step: the parameters must be those after the steps before the lease's. Else 0.
        local: use shared memory where a server is on this machine.
    """

    def __init__(self, source: Source, worker: str, layout: Layout, *, parts: int = 0, local: bool = True) -> None:
        self.worker, self.layout = worker, layout
        self._source, self._parts, self._local = source, parts, local
        self._outbox = Outbox(layout.size, layout.dtype)
        self._table: Table | None = None
        self._channels: list[Channel] = []
        self._whole = torch.empty(0, dtype=layout.dtype)
        self._holds = self._confirm = self._returned = -1
        self._beyond: tuple[int, int] | None = None

    # ---- what a worker does ----

    def take(self) -> int:
        """Waits up to a second for a lease, and brings the parameters up to date for it.

        Returns:
            The lease; else `ledger.WAIT` (ask again) or `ledger.END`.
        """
        return self._until_settled(self._take)

    def new_push(self, lease: int, counters: torch.Tensor) -> Sent:
        """Room for the gradient of a lease; `push` sends it when it is filled in.

        Args:
            lease: its number.
            counters: growth of the integer buffers, int64 (layout.num_counters,).
        """
        return self._outbox.new(lease, counters)

    def push(self, sent: Sent, *, wants: bool = True) -> Answer:
        """Sends a gradient to all servers, for good; with it comes the next lease, and its parameters, if one is free.

        Args:
            sent: from `new_push`, filled in.
            wants: ask for another lease.
        """
        return self._until_settled(lambda: self._push(sent, wants))

    def pull(self) -> None:
        """Brings the parameters up to date; from servers that have nothing newer nothing is sent."""
        self._until_settled(lambda: self._refresh(0))

    def leave(self) -> None:
        """Gives back the lease at work, and disconnects until the next call."""
        self._holds = -1
        for channel in self._channels:
            channel.close()

    @property
    def vector(self) -> torch.Tensor:
        """All parameters and float buffers, (layout.size,), only to be read; valid until the next call."""
        if len(self._channels) == 1:
            return self._channels[0].vector
        if not len(self._whole):
            self._whole = torch.empty(self.layout.size, dtype=self.layout.dtype)
        for channel in self._channels:
            self._whole[channel.place.start : channel.place.stop] = channel.vector
        return self._whole

    @property
    def counters(self) -> torch.Tensor:
        """The integer buffers, int64 (layout.num_counters,)."""
        return self._channels[0].counters if self._channels else torch.empty(0, dtype=torch.int64)

    @property
    def versions(self) -> list[int]:
        """The version that the part of each server in `vector` has."""
        return [channel.version for channel in self._channels]

    def close(self) -> None:
        """Ends all connections for good."""
        self.leave()
        self._outbox.close()

    # ---- requests ----

    def _take(self) -> int:
        request = Request(Op.TAKE, Flag.WANT_LEASE | Flag.WANT_PARAMETERS, confirm=self._confirm, returned=self._returned)
        if self._beyond is not None:
            lease, version = self._beyond
            request = request._replace(flags=request.flags | Flag.BEYOND, lease=lease, base=version)
            self._beyond = None  # told once: servers that have gone back are not to go back for it again
        reply = self._exchange({0: request})[0]
        self._confirm = self._returned = -1
        return self._begin(reply.lease, reply.version)

    def _push(self, sent: Sent, wants: bool) -> Answer:
        self._connect()
        alone = len(self._channels) == 1
        flags = Flag.WANT_LEASE | Flag.WANT_PARAMETERS if wants else Flag(0)
        # With one server its word is all that counts.
        first = Request(Op.PUSH, flags, confirm=sent.lease if alone else self._confirm, returned=self._returned)
        other = Request(Op.PUSH, Flag.WANT_PARAMETERS if wants and not self._parts else Flag(0))
        requests = {
            channel.number: (other if channel.number else first)._replace(base=channel.version) for channel in self._channels
        }
        replies = self._exchange(requests, sent)
        self._confirm = self._returned = -1
        self._outbox.forget({channel.number: channel.durable for channel in self._channels})
        if not sent.refused and not alone:
            self._confirm = sent.lease
        elif sent.refused and 0 not in sent.refused:
            self._returned = sent.lease
        reply = replies[0]
        lease = self._begin(reply.lease, reply.version) if self._parts else reply.lease
        self._holds = max(lease, -1)
        return Answer(bool(sent.refused), lease, reply.staleness)

    def _begin(self, lease: int, version: int) -> int:
        """Gets all parameters for a lease that was handed out at a version of the lead; returns the lease, or `WAIT`.

        In bulk mode another server may lack a part of an earlier step, which was lost. Then somebody has to do that part first,
        and that may be this worker: it asks again, by which it gives the lease back. Or a server may be beyond the lease's step,
        whose parameters are gone with that: the lead is told.
        """
        self._holds = max(lease, -1)
        if lease < 0:
            return lease
        if not self._parts:
            self._refresh(version)
            return lease
        self._connect()
        step = lease // self._parts
        others = [channel.number for channel in self._channels if channel.version != step]
        replies = self._exchange({number: Request(Op.PULL, Flag.WANT_PARAMETERS, exactly=step) for number in others})
        if all(channel.version == step for channel in self._channels):
            return lease
        highest = max(reply.version for reply in replies.values())
        if highest > step:
            self._beyond = lease, highest
        self._holds = -1
        return WAIT

    def _refresh(self, version: int) -> None:
        """Pulls from the servers that may have something newer than `version`."""
        self._connect()
        behind = [channel.number for channel in self._channels if not version or channel.version < version]
        self._exchange({number: Request(Op.PULL, Flag.WANT_PARAMETERS) for number in behind})

    def _exchange(self, requests: dict[int, Request], sent: Sent | None = None) -> dict[int, Reply]:
        """Sends requests, by number of the server, and returns their replies; connects again as often as it takes.

        Raises:
            Moved: the ranges were cut anew meanwhile.
        """
        replies: dict[int, Reply] = {}
        while len(replies) < len(requests):
            self._connect()
            asked = [number for number in requests if number not in replies]
            asked = [number for number in asked if self._ask(number, requests[number], sent)]
            for number in asked:
                reply = self._answer(number)
                if reply is None:
                    continue
                replies[number] = reply
                if sent is not None and reply.status == Status.REFUSED:
                    sent.refused.add(number)
                elif sent is not None:
                    sent.acknowledged[number], sent.missed[number] = reply.included, reply.staleness
        return replies

    def _ask(self, number: int, request: Request, sent: Sent | None) -> bool:
        """Whether a request could be sent; a lost connection is closed."""
        try:
            self._channels[number].ask(request, sent)
        except OSError:
            self._channels[number].close()
            return False
        return True

    def _answer(self, number: int) -> Reply | None:
        """A reply; None and a closed channel when the connection is lost."""
        try:
            return self._channels[number].answer()
        except OSError:
            self._channels[number].close()
            return None

    # ---- connections ----

    def _connect(self) -> None:
        """Connects to every server there is no connection to, waiting as long as it takes.

        Raises:
            Moved: the ranges were cut anew.
        """
        while self._table is None:
            self._use(self._source(None))
        while closed := [channel for channel in self._channels if not channel.connected]:
            try:
                for channel in closed:
                    channel.connect(self._table.number, self._holds)
            except OSError:
                channel.close()
                newer = self._source(self._table)
                if newer is None:
                    time.sleep(RETRY_S)
                elif newer.number != self._table.number:
                    raise Moved from None
                else:
                    self._table = newer
                    for known, place in zip(self._channels, newer.places, strict=True):
                        known.place = place

    def _use(self, table: Table | None) -> None:
        """Takes up a table, if there is one: new channels to all its servers."""
        if table is None:
            return
        self._table = table
        self._channels = [
            Channel(number, len(table.places), place, self.worker, self.layout, self._outbox, self._local)
            for number, place in enumerate(table.places)
        ]

    def _until_settled(self, call: Callable[[], Result]) -> Result:
        """Calls again when ranges were cut anew; they are while no push is under way, so the new servers have all of them."""
        while True:
            try:
                return call()
            except Moved:
                for channel in self._channels:
                    channel.close()
                self._channels, self._table = [], None
                self._outbox.reset()
                time.sleep(RETRY_S)
