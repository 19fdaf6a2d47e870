"""The actor around one server: where its state comes from and where it is kept."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from raytrain_app.actors import Actor, wait_for
from raytrain_app.errors import TrainingError
from raytrain_app.job import job_from_dict
from raytrain_app.strategies.parameter_server.conductor import Conductor
from raytrain_app.strategies.parameter_server.coordinator import Assignment, Beat, Orders
from raytrain_app.strategies.parameter_server.desk import Desk
from raytrain_app.strategies.parameter_server.keeper import Keeper
from raytrain_app.strategies.parameter_server.lead import Lead
from raytrain_app.strategies.parameter_server.meters import Meters
from raytrain_app.strategies.parameter_server.pieces import Pieces
from raytrain_app.strategies.parameter_server.policy import options, plan_of, policy_of
from raytrain_app.strategies.parameter_server.serving import Serving
from raytrain_app.strategies.parameter_server.shard import ShardState
from raytrain_app.strategies.parameter_server.table import Place
from raytrain_app.strategies.parameter_server.window import Window

TICK_S = 0.1
"""How often a server looks around."""
BORROWED_THREADS = 4
"""Most threads of a server that has no CPUs of its own."""


class Server:
    """One server: takes up its state, serves workers, and has the coordinator keep its state all the time.

    Args:
        number: of the server; 0 is the lead.
        job: the resolved job as plain data.
        num_rows: training rows.
        coordinator: the run's coordinator.
        evaluator: the run's evaluator.
    """

    def __init__(self, number: int, job: Mapping[str, Any], num_rows: int, coordinator: Actor, evaluator: Actor) -> None:
        self.number, self._job, self._num_rows = number, job_from_dict(job), num_rows
        torch.set_num_threads(1)
        context = ray.get_runtime_context()
        self._handle, self._node_id = context.current_actor, context.get_node_id()
        self._coordinator = coordinator
        # Without CPUs of its own a server computes for moments only, on cores that are likely to be idle: workers wait for it.
        threads = int(options(self._job).server_cpus) or min(os.cpu_count() or 1, BORROWED_THREADS)
        self._desk = Desk(Pieces(threads))
        self._serving = Serving(self._desk, ray.util.get_node_ip_address(), self._fail)
        self._conductor = Conductor(self._job, self._desk, coordinator, evaluator) if number == 0 else None
        self._keeper = Keeper(number, self._desk, coordinator, self._conductor)
        self._meters = Meters(self._job.name, number)
        self._table = self._servers = 0
        self._ready = threading.Event()
        threading.Thread(target=self._run, name="control", daemon=True).start()

    # ---- asked by others ----

    def compare(self, done: Mapping[str, Any]) -> tuple[list[int], int] | None:
        """Leases of the window `done` that this server has not applied, and the first lease above all that it has.

        None while it has not taken up its state.
        """
        with self._desk.lock:
            shard = self._desk.shard
            if shard is None:
                return None
            leases = Window.from_json(done)
            told = [*range(shard.applied.low, leases.low), *leases.above]
            return [lease for lease in told if not shard.holds(lease)], shard.known

    def captured(self, epoch: int) -> ShardState:
        """The state at the end of an epoch (from 1); in asynchronous modes the current one if this server was restarted since."""
        self._ready.wait()
        with self._desk.lock:
            if self._desk.is_bulk:  # one that was restored comes to it again, by what workers send or compute again
                self._desk.lock.wait_for(lambda: self._desk.shard is not None and self._desk.shard.epochs >= epoch)
            return self._desk.captured.get(epoch) or self._desk.state()

    def state(self) -> ShardState:
        """The current state."""
        self._ready.wait()
        return self._desk.state()

    def drain(self, asked: bool) -> bool:
        """With the lead: hands out no new leases, so that soon none is at work. True when it has heard."""
        with self._desk.lock:
            if self._desk.lead is None:
                return False
            self._desk.lead.ledger.draining = asked
            self._desk.lock.notify_all()
            return True

    def quiet(self) -> bool:
        """With the lead: whether no lease is at work."""
        with self._desk.lock:
            return self._desk.lead is not None and self._desk.lead.ledger.quiet

    def hand_on(self) -> ShardState:
        """See `Desk.hand_on`."""
        self._ready.wait()
        return self._desk.hand_on()

    def take_back(self) -> None:
        """See `Desk.take_back`."""
        self._desk.take_back()

    def status(self) -> dict[str, Any]:
        """What it holds and has counted; answers at once, whatever else it does."""
        place = self._place()
        return {
            "server": self.number,
            "pid": place.pid,
            "node": place.node_id,
            "start": place.start,
            "stop": place.stop,
            **self._desk.stats.read(),
        }

    # ---- the control thread ----

    def _run(self) -> None:
        try:
            self._take_up()
            while not (orders := self._beat()).over:
                if orders.table > self._table:
                    self._take_up()
                urgent = self._conductor.tick(orders) if self._conductor is not None else False
                self._keeper.tick(orders, urgent)
                self._desk.changed.wait(TICK_S)
                self._desk.changed.clear()
        except RayError:  # the coordinator is gone for good: so is the run
            pass
        except Exception as error:
            self._fail(error)

    def _take_up(self) -> None:
        """Waits for the state of this server's range, and serves it."""
        started_s = time.monotonic()
        while (found := wait_for(self._coordinator.attach.remote(self.number, time.monotonic() - started_s))) is None:
            pass
        assignment: Assignment = found
        state = assignment.state
        policy = policy_of(self._job, self._num_rows, state.num_parameters)
        lead = Lead(self._job, plan_of(self._job, self._num_rows), state.ledger) if self.number == 0 else None
        self._desk.install(assignment.table, policy, state, lead)
        self._table, self._servers = assignment.table, assignment.servers
        self._ready.set()
        self._keeper.take_up(state)

    def _beat(self) -> Orders:
        self._meters.update(self._desk.stats)
        details = self._conductor.details() if self._conductor is not None else {}
        scored = self._desk.lead.ledger.scored if self._desk.lead is not None else 0
        beat = Beat(self.number, self._table, self._servers, self._place(), self._desk.stats.read(), scored, details)
        orders: Orders = wait_for(self._coordinator.beat.remote(beat))
        return orders

    def _place(self) -> Place:
        shard = self._desk.shard
        start, stop = (shard.start, shard.stop) if shard is not None else (0, 0)
        return Place(start, stop, self._serving.address, self._handle, os.getpid(), self._node_id)

    def _fail(self, error: Exception) -> None:
        """An error that should not be: it ends the run, since a server that goes on without a part of itself helps nobody."""
        text = f"parameter server {self.number}: {type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        with suppress(RayError):  # the run may be over by now
            wait_for(self._coordinator.fail.remote(TrainingError(text, trace)))
