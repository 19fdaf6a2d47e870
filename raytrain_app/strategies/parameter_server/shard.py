"""One server's part of the parameters, and the rules by which pushes change it. No sockets and no Ray in here."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from raytrain_app.elastic.plan import Node, children
from raytrain_app.strategies.parameter_server.correction import Correction, root_mean_square
from raytrain_app.strategies.parameter_server.memory import Versions
from raytrain_app.strategies.parameter_server.pieces import ALIGNMENT, Pieces
from raytrain_app.strategies.parameter_server.update import Slots, Update
from raytrain_app.strategies.parameter_server.window import Window

PIECE = 1 << 15
"""Elements of one piece of an update: 128 KiB an operand."""


class Status(enum.IntEnum):
    """What became of a push, or of another request."""

    DONE = 0  # applied (or, in bulk mode, waiting for the rest of its step)
    DUPLICATE = 1  # its lease was applied before; nothing was changed
    REFUSED = 2  # computed at parameters that are too old; nothing was changed
    MOVED = 3  # this server does not hold that range any more; ask for the table again


@dataclass(frozen=True)
class Policy:
    """The rules of a run, the same on all servers.

    Attributes:
        update: the update rule.
        correction: of stale gradients.
        staleness: updates that a gradient may have missed; None is no bound.
        bulk: updates wait for all `parts` leases of a step and are made of their sum.
        parts: leases of one step; 1 unless `bulk`.
        steps_per_epoch: steps.
        num_parameters: leading elements of the flat vector that are parameters; float buffers follow.
    """

    update: Update = field(default_factory=Update)
    correction: Correction = field(default_factory=Correction)
    staleness: int | None = None
    bulk: bool = False
    parts: int = 1
    steps_per_epoch: int = 1
    num_parameters: int = 0


@dataclass
class ShardState:
    """Everything about a range that must survive its server: what is kept off the server, moved and checkpointed.

    Attributes:
        start, stop: the range's elements of the flat vector.
        vector: parameters and float buffers.
        slots: of the update rule and the correction, each (parameters in the range,) or (1,).
        counters: integer buffers, with the first range alone.
        version: counts up with every update.
        updates: updates applied.
        applied: leases applied.
        ledger: the ledger's and the journal's state, with the first range alone.
        num_parameters: leading elements of the whole flat vector that are parameters; float buffers follow.
        ends: in bulk mode, the states at the ends of epochs that are not scored yet, by epoch from 1.
    """

    start: int
    stop: int
    vector: np.ndarray
    slots: dict[str, np.ndarray]
    counters: np.ndarray
    version: int = 0
    updates: int = 0
    applied: dict[str, Any] = field(default_factory=lambda: Window().to_json())
    ledger: dict[str, Any] = field(default_factory=dict)
    num_parameters: int = 0
    ends: dict[int, ShardState] = field(default_factory=dict)


@dataclass(frozen=True)
class Push:
    """A gradient for one range.

    Attributes:
        lease: number of the piece of work it comes from. It identifies the push: however often and by whomever a lease
            is pushed, it is applied once.
        vector: gradient and float buffers of the range: of the mean loss, or in bulk mode of the summed loss.
        counters: by how much the integer buffers grew.
        base: version of the parameters at which it was computed; -1, not known, is too old.
        lr: learning rate.
        rows: rows behind it.
        missed: it was accepted before and is sent again to a restored server: the updates that it had missed then.
    """

    lease: int
    vector: torch.Tensor
    counters: torch.Tensor
    base: int
    lr: float
    rows: int
    missed: int | None = None

    @property
    def replay(self) -> bool:
        """Whether it was accepted before."""
        return self.missed is not None


class Shard:
    """A range of the flat vector with its slots. Callers hold the server's lock.

    Attributes:
        advanced: called after every update.
    """

    def __init__(self, policy: Policy, state: ShardState, pieces: Pieces | None = None) -> None:
        self.policy, self.start, self.stop = policy, state.start, state.stop
        self._pieces = pieces or Pieces()
        self.num_parameters = min(max(policy.num_parameters - state.start, 0), state.stop - state.start)
        self.versions = Versions(torch.from_numpy(np.array(state.vector)))
        self.slots: Slots = {name: torch.from_numpy(np.array(slot)) for name, slot in state.slots.items()}
        self.counters = torch.from_numpy(np.array(state.counters))
        self.version, self.updates = state.version, state.updates
        self.applied = Window.from_json(state.applied)
        self.advanced: Callable[[], None] = lambda: None
        self._partial: dict[int, dict[int, Push]] = {}
        self._restored = self._repeated = 0

    @staticmethod
    def new_slots(policy: Policy, num_parameters: int, dtype: torch.dtype) -> dict[str, np.ndarray]:
        """The slots of a range before the first update."""
        like = torch.zeros(num_parameters, dtype=dtype)
        slots = {**policy.update.new_slots(like), **policy.correction.new_slots(like)}
        return {name: slot.numpy() for name, slot in slots.items()}

    def staleness(self, push: Push) -> int:
        """Updates that the gradient missed; of one that is sent again, those that it had missed at first."""
        if self.policy.bulk:
            return 0
        if push.missed is not None:
            return push.missed
        return max(0, self.version - push.base - (self._repeated if push.base < self._restored else 0))

    def outdo(self, seen: int) -> None:
        """A worker has seen a later version of this range, which was restored since: no two versions may have one name."""
        if seen > self.version and not self.policy.bulk:
            self._restored = self.version = seen + 1
            self._repeated = 1  # nobody computed anything at the version that follows the last one seen

    def apply(self, push: Push, base: torch.Tensor | None = None) -> Status:
        """Takes a push.

        Args:
            push: what came.
            base: the parameters of version `push.base`, where they are still at hand.
        """
        step, part = divmod(push.lease, self.policy.parts)
        if push.lease in self.applied or part in self._partial.get(step, ()):
            return Status.DUPLICATE
        if self.policy.bulk:
            # The sender's memory is used again before the step is complete.
            self._partial.setdefault(step, {})[part] = replace(push, vector=push.vector.clone(), counters=push.counters.clone())
            self._apply_whole_steps()
            return Status.DONE
        bound = self.policy.staleness
        if not push.replay and (push.base < 0 or (bound is not None and self.staleness(push) > bound)):
            return Status.REFUSED
        self._update(push, base, self.staleness(push))
        self.applied.add(push.lease)
        self.advanced()
        return Status.DONE

    def holds(self, lease: int) -> bool:
        """Whether the lease's push is here, applied or waiting for the rest of its step."""
        step, part = divmod(lease, self.policy.parts)
        return lease in self.applied or part in self._partial.get(step, ())

    @property
    def known(self) -> int:
        """The first lease above all those whose push is here."""
        waiting = [step * self.policy.parts + part for step, parts in self._partial.items() for part in parts]
        return max([self.applied.low - 1, *self.applied.above, *waiting]) + 1

    def included(self, lease: int) -> int:
        """The version that has a lease's push in it, which is here: at the latest the current one, or that of its whole step."""
        return max(self.version, lease // self.policy.parts + 1) if self.policy.bulk else self.version

    def gap(self, base: torch.Tensor) -> float:
        """How far the parameters have moved from `base` (root mean square)."""
        n = self.num_parameters
        return root_mean_square(self.versions.current[:n], base[:n])

    @property
    def epochs(self) -> int:
        """Epochs of which every lease has been applied."""
        return self.applied.low // (self.policy.steps_per_epoch * self.policy.parts)

    def state(self, *, copy: bool = True) -> ShardState:
        """Everything, as of now.

        Args:
            copy: the parameters too. Without, they are the current version itself, which stays as it is while it is pinned.
        """
        vector = self.versions.current.numpy()
        return ShardState(
            self.start,
            self.stop,
            vector.copy() if copy else vector,
            {name: slot.numpy().copy() for name, slot in self.slots.items()},
            self.counters.numpy().copy(),
            self.version,
            self.updates,
            self.applied.to_json(),
            num_parameters=self.policy.num_parameters,
        )

    # ---- inside ----

    def _apply_whole_steps(self) -> None:
        """Bulk mode: applies the next steps in order, as far as all their parts are there."""
        parts = self.policy.parts
        while len(whole := self._partial.get(self.version, {})) == parts:
            del self._partial[self.version]
            self._update(sum_of_parts([whole[part] for part in range(parts)], self.num_parameters), None, 0)
            for lease in range((self.version - 1) * parts, self.version * parts):
                self.applied.add(lease)
            self.advanced()

    def _update(self, push: Push, base: torch.Tensor | None, staleness: int) -> None:
        """Writes the next version: parameters by the rules, float buffers moved towards the sender's."""
        n, old, policy = self.num_parameters, self.versions.current, self.policy
        index = self.versions.spare()
        new = self.versions.tensor(index)
        self.updates += 1

        def update(piece: slice) -> None:
            slots = {name: slot[piece] if slot.numel() == n else slot for name, slot in self.slots.items()}
            known = None if base is None else base[piece]
            corrected = policy.correction.apply(push.vector[piece], push.lr, staleness, old[piece], known, slots)
            policy.update.apply(old[piece], corrected.gradient, slots, corrected.lr, self.updates, new[piece])
            if corrected.divisor is not None:
                new[piece].sub_(old[piece]).div_(corrected.divisor).add_(old[piece])

        # Rules that go over their operands several times do so in pieces that stay in the cache.
        once = policy.update.name in ("sgd", "adam") and not (staleness and policy.correction.needs_base)
        self._pieces.each(n, max(n, 1) if once else PIECE, update)
        if n < len(old):
            # A weighted mean can never run away, however old the sender's statistics are.
            torch.lerp(old[n:], push.vector[n:], 1.0 / (1 + staleness), out=new[n:])
        if len(self.counters):
            self.counters = self.counters + push.counters
        policy.correction.learn(old[:n], new[:n], self.slots)
        self.versions.publish(index)
        self.version += 1
        self._repeated += push.replay  # whoever computes at an earlier version has not missed it: it was there before


def sum_of_parts(parts: Sequence[Push], num_parameters: int) -> Push:
    """A whole step from its parts, added up as the synchronous strategy does it.

    Float64 sums along the tree of `elastic.plan`, divided by the rows (buffers: by the parts with rows), rounded once.
    """
    filled = [part for part in parts if part.rows]
    rows = sum(part.rows for part in filled)
    total = _tree_sum([part.vector for part in parts], (0, len(parts)))
    total[:num_parameters].div_(rows)
    total[num_parameters:].div_(len(filled))
    counters = torch.stack([part.counters for part in parts]).amax(0)
    return replace(parts[0], vector=total.to(parts[0].vector.dtype), counters=counters, rows=rows)


def _tree_sum(leaves: Sequence[torch.Tensor], node: Node) -> torch.Tensor:
    if node[1] - node[0] == 1:
        return leaves[node[0]].to(torch.float64)
    left, right = children(node)
    return _tree_sum(leaves, left).add_(_tree_sum(leaves, right))


def ranges(size: int, servers: int) -> list[tuple[int, int]]:
    """Cuts a flat vector of `size` elements into `servers` ranges of nearly equal length, some empty if it is short."""
    blocks = -(-size // ALIGNMENT)
    cuts = [min(size, blocks * server // servers * ALIGNMENT) for server in range(servers + 1)]
    return list(itertools.pairwise(cuts))
