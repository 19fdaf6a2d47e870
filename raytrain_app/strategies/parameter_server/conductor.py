"""What the first server does for the run: tells its story, has epochs validated and checkpoints written, and ends it.

It runs beside the data path, in the server's control thread; workers never wait for it, unless they are an epoch ahead.
"""

from __future__ import annotations

import time
from typing import Any

import ray

from raytrain_app.actors import Actor, wait_for
from raytrain_app.elastic.plan import learning_rate
from raytrain_app.job import Job
from raytrain_app.strategies.parameter_server.coordinator import Orders
from raytrain_app.strategies.parameter_server.desk import Desk
from raytrain_app.strategies.parameter_server.lead import Lead, Scored
from raytrain_app.strategies.parameter_server.shard import ShardState
from raytrain_app.strategies.parameter_server.snapshot import progress_of

RECONCILE_S = 2.0
"""How often the other servers are asked whether they lack something; what they lack twice is done again."""

STUCK_HEARTBEATS = 5
"""`failure.heartbeat_s` times this is how long a worker may be at one lease: its heart beats on when only its training hangs."""


class Conductor:
    """The control of one run. `tick` is called by one thread, every now and then.

    Args:
        job: what is trained.
        desk: of the first server.
        coordinator: the run's coordinator.
        evaluator: the run's evaluator.
    """

    def __init__(self, job: Job, desk: Desk, coordinator: Actor, evaluator: Actor) -> None:
        self._job, self._desk, self._coordinator, self._evaluator = job, desk, coordinator, evaluator
        self._incarnation = ""
        self._kept_clock = self._kept_step = self._told = -1
        self._points: dict[int, tuple[int, int]] = {}
        self._saved_step = 0
        self._scoring: Any = None
        self._saving: Any = None
        self._finishing: Any = None
        self._missing: set[int] = set()
        self._reconciled_s = 0.0

    def take_up(self, state: ShardState) -> None:
        """The lead begins with a state that is kept elsewhere; what was under way for another one is void."""
        if self._kept_step < 0:
            self._saved_step = progress_of(state).step
        self._scoring, self._missing = None, set()
        self._points.clear()
        self.sent(state)
        self.kept(state.version)

    def sent(self, state: ShardState) -> None:
        """A state has been sent to where it will be kept."""
        progress = progress_of(state)
        self._points[state.version] = progress.clock, progress.step

    def kept(self, version: int) -> None:
        """The state of a version is kept. Only what is in it may be told to the driver: it cannot be undone any more."""
        if version in self._points:
            self._kept_clock, self._kept_step = self._points[version]
            self._points = {known: point for known, point in self._points.items() if known > version}

    def tick(self, orders: Orders) -> bool:
        """Looks at what there is to do. True when the state should be kept at once, since somebody waits for it."""
        lead = self._desk.lead
        if lead is None:
            return False
        with self._desk.lock:
            lead.expect(orders.workers)
            stuck = lead.ledger.holders(time.monotonic() - STUCK_HEARTBEATS * self._job.failure.heartbeat_s)
        for worker in stuck & orders.workers:
            wait_for(self._coordinator.evict.remote(worker, "stuck"))
        self._deliver(lead, orders)
        if self._finishing is not None:
            self._end(lead)
            return False
        if lead.beyond >= 0:
            batch_size = self._job.train.global_batch_size
            wait_for(self._coordinator.roll_back.remote(self._desk.table, lead.beyond, batch_size))
            return False
        self._reconcile(lead)
        scored = self._score(lead)
        self._checkpoint(orders)
        return self._finish(lead, orders) or scored

    def details(self) -> dict[str, Any]:
        """Values of the lead for the line of metrics.jsonl about the servers."""
        lead = self._desk.lead
        if lead is None:
            return {}
        with self._desk.lock:
            counts, progress = lead.ledger.counts, lead.progress
            return {
                "epoch": min(progress.epoch + 1, self._job.train.epochs),
                "step": progress.step,
                "samples": progress.samples,
                "refused": counts.refused,
                "returned": counts.returned,
                "lost": counts.lost,
                "workers": lead.workers,
            }

    def _deliver(self, lead: Lead, orders: Orders) -> None:
        if orders.incarnation != self._incarnation:
            self._incarnation, self._told = orders.incarnation, orders.recorded
        with self._desk.lock:
            records = lead.undelivered(orders.recorded)
            news = [(clock, record) for clock, record in records if self._told < clock <= self._kept_clock]
        if news:
            self._told = wait_for(self._coordinator.record.remote(news))

    def _reconcile(self, lead: Lead) -> None:
        """Does again what some server lacks: it was restored, and whoever had pushed it was lost as well.

        A worker may be just about to send it again; so it counts when it is missing twice.
        """
        if time.monotonic() - self._reconciled_s < RECONCILE_S:
            return
        self._reconciled_s = time.monotonic()
        lacking = self._compare(lead)
        if lacking is None:
            return
        with self._desk.lock:
            lead.ledger.undo(lacking & self._missing)
            self._desk.lock.notify_all()
        self._missing = lacking

    def _compare(self, lead: Lead) -> set[int] | None:
        """Compares what is done with what the other servers have.

        Leases that another one has and the lead, which was restored, has never heard of, are handed out from now on.

        Returns:
            Leases that are done and that some other server lacks; None when one of them cannot be asked.
        """
        table = wait_for(self._coordinator.table.remote(None))
        if table is None or table.number != self._desk.table:
            return None
        with self._desk.lock:
            done = lead.ledger.done.to_json()
        answers = wait_for([place.handle.compare.remote(done) for place in table.places[1:]])
        if None in answers:
            return None
        with self._desk.lock:
            for _, known in answers:
                lead.ledger.admit(known)
        return {lease for lacking, _ in answers for lease in lacking}

    def _score(self, lead: Lead) -> bool:
        """Has complete epochs validated, one after the other. True when one is."""
        if self._scoring is None:
            with self._desk.lock:
                epoch = lead.unscored_epoch()
            if epoch is not None and self._compare(lead) == set():
                self._scoring = self._evaluator.score.remote(epoch)
            return False
        scored: Scored | None = _if_ready(self._scoring)
        if scored is None:
            return False
        self._scoring = None
        with self._desk.lock:
            step = (lead.ledger.scored + 1) * lead.ledger.plan.steps_per_epoch - 1
            lead.scored(scored, self._learning_rate(lead, step))
            self._desk.lock.notify_all()
        self._saved_step = self._kept_step
        return True

    def _learning_rate(self, lead: Lead, step: int) -> float:
        rule, plan = self._job.optimizer, lead.ledger.plan
        return learning_rate(rule.schedule, rule.lr, step, plan.epochs * plan.steps_per_epoch, rule.warmup_steps)

    def _checkpoint(self, orders: Orders) -> None:
        """Has the newest kept states written to storage, when it is time or when somebody asks."""
        every = self._job.checkpoint.every_steps
        if self._saving is not None and _if_ready(self._saving) is None:
            return
        self._saving = None
        if self._kept_step // every > self._saved_step // every or (orders.checkpoint and self._kept_step > 0):
            self._saved_step = self._kept_step
            self._saving = self._evaluator.save.remote()

    def _finish(self, lead: Lead, orders: Orders) -> bool:
        """Ends the run when there is nothing more to do. True when the state must be kept before that."""
        ledger, progress = lead.ledger, lead.progress
        with self._desk.lock:
            done = ledger.finished and progress.epoch == self._job.train.epochs
            early = progress.stopped_early or (orders.stop and not ledger.finished)
            ledger.draining = ledger.draining or early
            if not (done or (early and ledger.quiet)) or self._scoring is not None:
                return False
            status = "early_stopped" if progress.stopped_early else "finished" if done else "stopped"
        if self._compare(lead) != set():
            return False
        with self._desk.lock:
            if not (done or ledger.quiet):  # another server knew of more
                return False
        if orders.recorded < progress.clock:  # the driver has not written everything yet
            return self._kept_clock < progress.clock
        self._finishing = self._evaluator.finish.remote(status)
        return False

    def _end(self, lead: Lead) -> None:
        summary = _if_ready(self._finishing)
        if summary is not None:
            wait_for(self._coordinator.finish.remote(summary))
            with self._desk.lock:
                lead.ledger.ended = True
                self._desk.lock.notify_all()


def _if_ready(reference: Any) -> Any:
    """The value behind a reference, None while it is not there."""
    ready, _ = ray.wait([reference], timeout=0)
    return wait_for(reference) if ready else None
