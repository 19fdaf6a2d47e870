"""What a server does with requests, one at a time behind one lock. No sockets and no Ray in here."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from raytrain_app.strategies.parameter_server.lead import Lead
from raytrain_app.strategies.parameter_server.ledger import WAIT, Outcome
from raytrain_app.strategies.parameter_server.memory import bytes_of
from raytrain_app.strategies.parameter_server.pieces import Pieces
from raytrain_app.strategies.parameter_server.session import Session
from raytrain_app.strategies.parameter_server.shard import Policy, Push, Shard, ShardState, Status
from raytrain_app.strategies.parameter_server.stats import Stats
from raytrain_app.strategies.parameter_server.wire import Buffer, Flag, Hello, Op, Reply, Request

WAIT_S = 1.0
"""Longest time that a request is held back; then the worker looks around and asks again."""
GAP_SHARE = 0.02
"""Part of the time that measuring gaps may take."""
FIRST_PACE = 16
"""Versions between two snapshots before it is known how fast they come."""
EPOCHS_KEPT = 2
"""Ends of epochs that are kept for validation; workers are never further ahead of it."""


@dataclass(frozen=True)
class Answer:
    """What to send: a reply, the parts of its body, and the file of shared memory that goes with it (-1 for none)."""

    reply: Reply
    body: Sequence[Buffer] = ()
    fd: int = -1


@dataclass(frozen=True)
class Told:
    """What comes with a push for the lead: more scores, and with audit the ids of the rows behind the gradient."""

    extra: list[float]
    ids: list[int]


NOTHING_TOLD = Told([], [])


class HungUp(Exception):
    """The session has no right to go on: a newer connection of its worker has taken its place, or the range has moved."""


class Desk:
    """A range, and with the first one the lead, shared by the threads of all connections.

    Args:
        pieces: threads that compute; the caller's alone without.

    Attributes:
        lock: guards everything; waits on it end when something has changed.
        changed: set when an epoch has ended.
        table: number of the table that the range is from; -1 while it is being handed on.
        durable: versions up to this one are kept elsewhere.
        captured: states at the ends of the last epochs, by epoch from 1.
        scored: epochs whose validation is known, as far as this server has heard.
        snapshot_every: in bulk mode, versions between two snapshots, see `Keeper`.
    """

    def __init__(self, pieces: Pieces | None = None) -> None:
        self._pieces = pieces
        self.lock = threading.Condition()
        self.changed = threading.Event()
        self.shard: Shard | None = None
        self.lead: Lead | None = None
        self.table = self.durable = self.scored = 0
        self.stats = Stats()
        self.captured: dict[int, ShardState] = {}
        self.snapshot_every = FIRST_PACE
        self._snapshot: ShardState | None = None
        self._sessions: dict[str, Session] = {}
        self._handed_on = 0
        self._gap_s = self._gap_cost_s = 0.0

    # ---- the range comes and goes ----

    def install(self, table: int, policy: Policy, state: ShardState, lead: Lead | None) -> None:
        """Takes up a range: at the start, after a restart, or when ranges were cut anew."""
        with self.lock:
            self._hang_up()
            if self.shard is not None:
                self.shard.versions.close()
            self.shard, self.lead, self.table = Shard(policy, state, self._pieces), lead, table
            self.durable = state.version
            self.captured = dict(state.ends)
            self._snapshot = None
            self.shard.advanced = self._advanced
            if self.is_bulk and self._ends_epoch():
                self._capture(self.shard.epochs)
            self.lock.notify_all()

    def hand_on(self) -> ShardState:
        """Takes no more requests until `install` or `take_back`, and returns the state; workers look for a newer table."""
        with self.lock:
            if self.table >= 0:
                self._handed_on, self.table = self.table, -1
            self._hang_up()
            return self._state()

    def take_back(self) -> None:
        """Goes on with the range that was to be handed on."""
        with self.lock:
            self.table = self._handed_on if self.table < 0 else self.table

    def state(self, *, copy: bool = True) -> ShardState:
        """Everything as of now; see `Shard.state`."""
        with self.lock:
            return self._state(copy=copy)

    @property
    def is_bulk(self) -> bool:
        """Whether all servers apply whole steps, one after the other: then a version is a number of steps."""
        return self.shard is not None and self.shard.policy.bulk

    def take_snapshot(self) -> ShardState | None:
        """In bulk mode, the newest snapshot that has not been taken yet. Callers hold the lock."""
        taken, self._snapshot = self._snapshot, None
        return taken

    def snapshot_now(self) -> ShardState | None:
        """In bulk mode, a snapshot of this version, if the run could go on from it. Callers hold the lock."""
        return self._state() if self._is_sound() else None

    def _state(self, *, copy: bool = True) -> ShardState:
        assert self.shard is not None, "a state was asked for before `install`"
        state = self.shard.state(copy=copy)
        state.ledger = self.lead.to_json() if self.lead is not None else {}
        if self.is_bulk:
            scored = self.lead.ledger.scored if self.lead is not None else self.scored
            state.ends = {e: end for e, end in self.captured.items() if e > scored and end.version < state.version}
        return state

    def _hang_up(self) -> None:
        for session in self._sessions.values():
            session.peer.close()
        self._sessions.clear()
        self.lock.notify_all()

    # ---- workers come and go ----

    def welcome(self, session: Session, hello: Hello) -> tuple[Reply, list[int]]:
        """Takes a worker in, unless it comes with another table (`Status.MOVED`).

        Returns:
            The reply, and those of `hello.kept` that this server lacks.
        """
        with self.lock:
            shard = self.shard
            if shard is None or hello.table != self.table:
                return Reply(Status.MOVED), []
            shard.outdo(hello.seen)
            self._sessions[session.worker] = session
            if self.lead is not None:
                self.lead.hello(session.worker, hello.holds, shard.version)
                for lease in hello.confirmed:
                    self._confirm(self.lead, lease)
            reply = Reply(Status.DONE, version=shard.version, durable=self.durable)
            return reply, [lease for lease in hello.kept if not shard.holds(lease)]

    def goodbye(self, session: Session) -> None:
        """A connection has ended."""
        with self.lock:
            session.unpin()
            if self._sessions.get(session.worker) is session:
                del self._sessions[session.worker]
                self.stats.seen_s.pop(session.worker, None)
                if self.lead is not None:
                    self.lead.goodbye(session.worker)
            self.lock.notify_all()

    # ---- requests ----

    def answer(self, session: Session, request: Request, push: Push | None, told: Told) -> Answer:
        """Does what a worker asks.

        Args:
            session: its connection.
            request: what it asks.
            push: the gradient that came with it.
            told: what came beside it.

        Raises:
            HungUp: the session is not valid any more.
        """
        with self.lock:
            self._require(session)
            shard, lead = self.shard, self.lead
            assert shard is not None, "sessions begin after `install`"
            status, staleness, lease = Status.DONE, 0, WAIT
            if push is not None:
                staleness = shard.staleness(push)
                status = self._apply(session, shard, push, staleness)
            if lead is not None:
                self._tell(lead, session, request, status, staleness, told)
                if request.flags & Flag.WANT_LEASE:
                    lease = self._take(lead, session, shard, may_wait=request.op == Op.TAKE)
            if request.op == Op.PULL:
                self.lock.wait_for(lambda: shard.version >= request.exactly or not self._valid(session), WAIT_S)
                self._require(session)
            included = shard.included(request.lease)
            reply = Reply(
                status, version=shard.version, lease=lease, durable=self.durable, included=included, staleness=staleness
            )
            wanted = bool(request.flags & Flag.WANT_PARAMETERS) and request.exactly in (-1, shard.version)
            if request.flags & Flag.WANT_LEASE and lease < 0:
                wanted = False  # they would be old by the time there is a lease
            return self._with_parameters(session, shard, reply) if wanted and shard.version != request.have else Answer(reply)

    def _valid(self, session: Session) -> bool:
        return self._sessions.get(session.worker) is session

    def _require(self, session: Session) -> None:
        if not self._valid(session):
            raise HungUp

    def _apply(self, session: Session, shard: Shard, push: Push, staleness: int) -> Status:
        base, stats = session.base(push.base), self.stats
        if base is not None and not shard.policy.bulk:
            self._measure_gap(shard, base)
        status = shard.apply(push, base)
        stats.in_bytes += push.vector.numel() * push.vector.itemsize
        stats.seen_s[session.worker] = time.monotonic()
        if status is Status.DONE:
            stats.pushes += 1
            stats.replayed += push.replay
            stats.staleness[staleness] += 1
            self.lock.notify_all()
        elif status is Status.DUPLICATE:
            stats.duplicates += 1
        else:
            stats.refused += 1
        if self.lead is None and not shard.policy.bulk and shard.epochs and shard.epochs not in self.captured:
            self._capture(shard.epochs)
        return status

    def _advanced(self) -> None:
        """The range has a new version. In bulk mode all servers know alone what to keep of it."""
        if not self.is_bulk:
            return
        if self._ends_epoch():
            assert self.shard is not None, "it was just updated"
            self._capture(self.shard.epochs)
        if self.lead is None:
            self._take_snapshot_if_due()

    def _ends_epoch(self) -> bool:
        shard = self.shard
        assert shard is not None, "asked of a range that there is"
        return shard.version > 0 and shard.version % shard.policy.steps_per_epoch == 0

    def _take_snapshot_if_due(self) -> None:
        shard = self.shard
        assert shard is not None, "asked of a range that there is"
        if (shard.version % self.snapshot_every == 0 or self._ends_epoch()) and self._is_sound():
            self._snapshot = self._state()
            self.changed.set()

    def _is_sound(self) -> bool:
        """Whether the run could go on from this version: the lead must know every step before it as done."""
        assert self.shard is not None, "asked of a range that there is"
        return self.lead is None or self.lead.ledger.done.low == self.shard.version * self.shard.policy.parts

    def _tell(self, lead: Lead, session: Session, request: Request, status: Status, staleness: int, told: Told) -> None:
        """Lets the ledger know what became of leases."""
        refused = status is Status.REFUSED
        if request.returned >= 0:
            lead.ledger.put_back(request.returned)
        if request.op == Op.PUSH and refused:
            lead.ledger.put_back(request.lease)
        elif request.op == Op.PUSH:
            outcome = Outcome(
                worker=session.worker,
                loss=request.loss,
                correct=request.correct,
                rows=request.rows,
                extra=told.extra,
                lr=request.lr,
                staleness=staleness,
                ids=told.ids,
                time=time.time(),
            )
            lead.ledger.applied(request.lease, outcome)
        if request.confirm >= 0 and not (refused and request.confirm == request.lease):
            self._confirm(lead, request.confirm)
        if request.flags & Flag.BEYOND:
            lead.out_of_reach(request.lease, request.base)

    def _confirm(self, lead: Lead, lease: int) -> None:
        done = lead.ledger.done.low
        if lead.confirm(lease):
            epoch = lead.ledger.epochs_done
            if self.is_bulk and epoch in self.captured:  # when its last step was applied; what the lead tells belongs to it too
                self.captured[epoch].ledger = lead.to_json()
                self.changed.set()
            else:
                self._capture(epoch)
        if self.is_bulk and lead.ledger.done.low > done:
            self._take_snapshot_if_due()

    def _take(self, lead: Lead, session: Session, shard: Shard, may_wait: bool) -> int:
        lease = lead.take(session.worker, shard.version)
        if lease != WAIT or not may_wait:
            return lease
        started_s = time.monotonic()
        deadline_s = started_s + WAIT_S
        while lease == WAIT and (rest_s := deadline_s - time.monotonic()) > 0:
            self.lock.wait(rest_s)
            self._require(session)
            lease = lead.take(session.worker, shard.version)
        self.stats.waited += 1
        self.stats.waited_s += time.monotonic() - started_s
        return lease

    def _with_parameters(self, session: Session, shard: Shard, reply: Reply) -> Answer:
        pinned = session.pin(shard.versions, shard.version)
        self.stats.out_bytes += pinned.vector.numel() * pinned.vector.itemsize
        counters = shard.counters.numpy().tobytes()
        if not session.shares:
            body: list[Buffer] = [bytes_of(pinned.vector), counters]
            return Answer(reply._replace(flags=int(Flag.PARAMETERS)), body)
        fd = -1
        if pinned.index not in session.has:
            session.has.add(pinned.index)
            fd = shard.versions.segments[pinned.index].fd
        return Answer(reply._replace(flags=int(Flag.PARAMETERS), buffer=pinned.index), [counters], fd)

    def _capture(self, epoch: int) -> None:
        """Keeps the state at the end of an epoch for its validation and checkpoint."""
        self.captured[epoch] = replace(self._state(), ends={})
        for old in [known for known in self.captured if known <= epoch - EPOCHS_KEPT]:
            del self.captured[old]
        self.changed.set()

    def _measure_gap(self, shard: Shard, base: torch.Tensor) -> None:
        now_s = time.monotonic()
        if now_s - self._gap_s >= max(0.1, self._gap_cost_s / GAP_SHARE):
            self.stats.gap = shard.gap(base)
            self._gap_s = time.monotonic()
            self._gap_cost_s = self._gap_s - now_s
