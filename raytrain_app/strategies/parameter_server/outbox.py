"""A worker's pushes until they are safe: where gradients are written, and what a restored server is sent again."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from raytrain_app.strategies.parameter_server.memory import Segment

OUTBOX_BYTES = 64 * 2**20
"""How much memory unsafe pushes may take; at least two are kept. What does not fit is computed again if it is ever lost."""
OUTBOX_PUSHES = 4096


@dataclass
class Sent:
    """A push of this worker.

    Attributes:
        lease: its number.
        slot: where its vector lies.
        vector: the whole flat vector; each server takes its range.
        counters: growth of the integer buffers.
        lr, loss, correct, rows, extra, ids: see `ledger.Outcome`.
        acknowledged: by number of the server, the version there that has it in it.
        missed: by number of the server, the updates that it had missed there.
        refused: servers that found it too old; it must not be sent to them again.
    """

    lease: int
    slot: int
    vector: torch.Tensor
    counters: torch.Tensor
    lr: float = 0.0
    loss: float = 0.0
    correct: float = 0.0
    rows: int = 0
    extra: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    acknowledged: dict[int, int] = field(default_factory=dict)
    missed: dict[int, int] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)

    def safe(self, durable: dict[int, int]) -> bool:
        """Whether no server will ever need it again."""
        return all(
            server in self.refused or self.acknowledged.get(server, version + 1) <= version for server, version in durable.items()
        )


class Outbox:
    """Slots for gradients in memory that the servers of this machine can map.

    Args:
        size: elements of the flat vector.
        dtype: its dtype.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.stride = slot_stride(size)
        slots = min(max(OUTBOX_BYTES // (self.stride * dtype.itemsize), 2), OUTBOX_PUSHES)
        self.segment = Segment(slots * self.stride * dtype.itemsize)
        self._whole, self._size = self.segment.tensor(dtype), size
        self._free = list(reversed(range(slots)))
        self._sent: dict[int, Sent] = {}
        self._durable: dict[int, int] = {}

    def new(self, lease: int, counters: torch.Tensor) -> Sent:
        """Room for a push; the caller fills in the rest. The oldest push gives way if all slots are taken."""
        if not self._free:
            self._drop(next(iter(self._sent)))
        slot = self._free.pop()
        sent = Sent(lease, slot, self._whole[slot * self.stride : slot * self.stride + self._size], counters)
        self._sent[slot] = sent
        return sent

    def sent_to(self, server: int) -> list[Sent]:
        """Pushes that a server has acknowledged, in the order in which it applied them."""
        known = [sent for sent in self._sent.values() if server in sent.acknowledged]
        return sorted(known, key=lambda sent: sent.acknowledged[server])

    def forget(self, durable: dict[int, int]) -> None:
        """Frees pushes that every server keeps safely.

        Args:
            durable: by number of the server, the version up to which that is so.
        """
        if durable == self._durable:
            return
        self._durable = durable
        for slot, sent in list(self._sent.items()):
            if sent.safe(durable):
                self._drop(slot)

    def reset(self) -> None:
        """Ranges were cut anew: nothing that was sent before has to be sent again, but for what was under way."""
        for sent in self._sent.values():
            sent.acknowledged.clear()
            sent.refused.clear()

    def _drop(self, slot: int) -> None:
        del self._sent[slot]
        self._free.append(slot)

    def close(self) -> None:
        self.segment.close()


def slot_stride(size: int) -> int:
    """Elements from one slot to the next."""
    return -(-max(1, size) // 64) * 64
