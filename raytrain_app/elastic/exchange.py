"""What the members of a process group send each other: from each to each, and from one to others.

All of it goes as messages of two, by isend and irecv, since gloo has a weakness: when a member dies, a message that is partly
through is not told, and whoever waits for it, as gloo's collectives do, waits until the group's time-out. A message that has not
begun is told at once. So a long packet goes as two messages, of which the second one is short and is waited for first. And a send
is waited for only when it is known to be over, as its receiver has sent something since it got it, or when it is short. Nothing
that was begun may be let go of before that, unless the group is given up: what is half received would never end.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import cast

import torch
import torch.distributed as dist

SHORT_BYTES = 4096
"""A message of so many bytes at most is practically always through at once: a socket's buffer takes it."""


class PeerLost(Exception):
    """A collective failed since a member is gone; this worker has applied nothing of what it was to compute."""


@contextmanager
def collective() -> Iterator[None]:
    """Turns the errors of collectives, which are RuntimeErrors, into `PeerLost`. Put nothing else inside."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from error


class Exchange:
    """A packet from this member to each other one, and one from each to this one, as often as wanted.

    All members call `begin` for their exchanges in one order, and may begin several before they `wait`. What is sent must stay as
    it is until each receiver has sent something else that it does only once it has waited.

    Args:
        rank: of this member in the group.
        received: where the packets of all members go, by rank, this one's too. One without elements is not sent.
        sent: what they get, by rank.
        group: None is all members.
    """

    def __init__(
        self, rank: int, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], group: dist.ProcessGroup | None
    ) -> None:
        self._group = group
        self._own = received[rank], sent[rank]
        self._received = [(part, peer) for peer, t in enumerate(received) if peer != rank for part in _messages(t)]
        self._sent = [(part, peer) for peer, t in enumerate(sent) if peer != rank for part in _messages(t)]
        self._receives: list[dist.Work] = []
        self._sends: list[dist.Work] = []
        _exchanges.add(self)

    def expect(self) -> None:
        """Makes ready to receive, in the order of `begin`, which else does it itself: who sends early then need not wait.

        Raises:
            PeerLost: a member is gone.
        """
        if not self._on_gpu():
            group = _or_all(self._group)
            with collective():
                self._receives = [group.recv([part], peer, 0) for part, peer in self._received]

    def begin(self) -> None:
        """Begins to send, and to receive.

        Raises:
            PeerLost: a member is gone.
        """
        received, sent = self._own
        if received.data_ptr() != sent.data_ptr():
            received.copy_(sent)
        self.settle()
        if not self._on_gpu():
            if not self._receives:
                self.expect()
            group = _or_all(self._group)
            with collective():
                self._sends = [group.send([part], peer, 0) for part, peer in self._sent]
        elif self._received or self._sent:  # NCCL wants to know of all at once
            both = (dist.irecv, self._received), (dist.isend, self._sent)
            operations = [dist.P2POp(kind, t, group=self._group, group_peer=peer) for kind, todo in both for t, peer in todo]
            with collective():
                self._receives = dist.batch_isend_irecv(operations)

    def wait(self) -> None:
        """Waits until everything is received.

        Raises:
            PeerLost: a member is gone.
        """
        _wait_for(self._receives, _limit(self._group, self._own[0]))

    def settle(self) -> None:
        """Waits until everything is sent.

        Raises:
            PeerLost: a member is gone.
        """
        _wait_for(self._sends, _limit(self._group, self._own[0]))

    def give_up(self) -> None:
        """Lets go of what was begun."""
        self._receives.clear()
        self._sends.clear()

    def _on_gpu(self) -> bool:
        return self._own[0].is_cuda


_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()


def disconnect() -> None:
    """Destroys all process groups, so that peers that wait for this member are told at once."""
    for exchange in _exchanges:  # what they have begun would keep the connections open
        exchange.give_up()
    if dist.is_initialized():
        # A group with a dead member may complain while it goes; it is gone all the same.
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _or_all(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = group or dist.group.WORLD
    assert group is not None, "there is one by now"
    return group


def _messages(packet: torch.Tensor) -> Sequence[torch.Tensor]:
    """A packet as one message, none if it is empty, or two."""
    flat = packet.view(-1)
    parts = (flat[:-1], flat[-1:]) if packet.nbytes > SHORT_BYTES else (flat,)
    return [part for part in parts if part.numel() > 0]


def _limit(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> datetime.timedelta:
    """How long to wait for a message: gloo's would take the time-out that the group had while it connected.

    Nothing, which is the group's own time-out, for NCCL, where any other would have the processor wait for the GPU.
    """
    if tensor.is_cuda:
        return datetime.timedelta()
    limit: datetime.timedelta = _or_all(group)._get_backend(tensor.device).options._timeout
    return limit


def _wait_for(works: list[dist.Work], limit: datetime.timedelta) -> None:
    """Waits for the last one first, and lets go of each that is over."""
    with collective():
        while works:
            works.pop().wait(limit)


def gather(own: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """All members' values, (members, *own.shape), by rank.

    Raises:
        PeerLost: a member is gone.
    """
    world_size = dist.get_world_size(group)
    values = own.new_empty(world_size, *own.shape)
    exchange = Exchange(dist.get_rank(group), list(values), [own] * world_size, group)
    exchange.begin()
    exchange.wait()
    if own.nbytes > SHORT_BYTES:
        gather(own.new_zeros(1), group)  # tells that all have got it
    exchange.settle()
    return values


def sums_of_all(own: torch.Tensor, world_size: int) -> list[float]:
    """Sums of all members' values, float64, added in the order of their ranks."""
    own = own.double()
    return cast(list[float], (own if world_size == 1 else gather(own).sum(0)).tolist())


def broadcast(
    tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None = None, receivers: Sequence[int] | None = None
) -> None:
    """Sends rank `source`'s tensor, on its CPU, into those of `receivers`, by default of all. They and the source call it.

    It goes down a binomial tree, so that the source sends it log2(members) times. Receivers tell when they have it.

    Raises:
        PeerLost: a member is gone.
    """
    everybody = _or_all(group)
    others = range(everybody.size()) if receivers is None else receivers
    members = [source, *(rank for rank in others if rank != source)]
    place = members.index(everybody.rank())
    reach = place & -place or 1 << len(members).bit_length()  # places below that plus the own one are reached through it
    below = [place + step for step in (1 << n for n in range(reach.bit_length() - 1)) if place + step < len(members)]
    told, received, limit = tensor.new_zeros(1), tensor.new_empty(1), _limit(group, tensor)

    def receive(into: torch.Tensor, place: int) -> None:
        with collective():
            works = [everybody.recv([part], members[place], 0) for part in _messages(into)]
        _wait_for(works, limit)

    def send(what: torch.Tensor, place: int) -> list[dist.Work]:
        with collective():
            return [everybody.send([part], members[place], 0) for part in _messages(what)]

    if place > 0:
        receive(tensor, place - reach)
    sends = [work for child in reversed(below) for work in send(tensor, child)]
    if place > 0:
        sends += send(told, place - reach)
    for child in reversed(below):
        receive(received, child)
    _wait_for(sends, limit)


def broadcast_bytes(
    data: bytes | None, source: int, group: dist.ProcessGroup | None = None, receivers: Sequence[int] | None = None
) -> bytes:
    """Sends the `data` of rank `source` as `broadcast` does and returns it; only the source passes it.

    Raises:
        PeerLost: a member is gone.
    """
    size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
    broadcast(size, source, group, receivers)
    if size == 0:
        return b""
    buffer = torch.empty(int(size), dtype=torch.uint8) if data is None else torch.frombuffer(bytearray(data), dtype=torch.uint8)
    broadcast(buffer, source, group, receivers)
    return buffer.numpy().tobytes() if data is None else data
