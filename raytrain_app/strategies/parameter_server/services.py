"""The driver's side: starts servers and evaluator, changes how many servers there are, and ends them all."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import fields
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_app.actors import Actor, start_here, wait_for
from raytrain_app.elastic.progress import Progress, record_clock
from raytrain_app.job import Job, job_from_dict
from raytrain_app.storage.checkpoints import CheckpointStore
from raytrain_app.storage.rundir import RunDirectory
from raytrain_app.strategies.parameter_server.evaluator import Evaluator
from raytrain_app.strategies.parameter_server.policy import options
from raytrain_app.strategies.parameter_server.server import Server
from raytrain_app.strategies.parameter_server.shard import ShardState
from raytrain_app.strategies.parameter_server.snapshot import cut_anew
from raytrain_app.strategies.worker import WorkerSpec

POLL_S = 0.05
SETTLE_S = 1.0
"""How long servers that do not agree are left alone: workers connect and send again what one lacks, and the lead compares."""
CLOSE_S = 10.0
SERVER_THREADS = 16
"""Calls that a server answers at a time."""


class ParameterServers:
    """Servers and evaluator of one run. The driver owns them: they end with it.

    Args:
        spec: what a worker gets.
        num_rows: training rows.
        evaluator: what begins, validates and ends the run instead of an `Evaluator`.
    """

    def __init__(self, spec: WorkerSpec, num_rows: int, evaluator: Actor | None = None) -> None:
        self._spec, self._num_rows = spec, num_rows
        self._job = job_from_dict(spec.job)
        self._coordinator = spec.membership
        self._evaluator = evaluator if evaluator is not None else start_here(Evaluator, spec)
        self._servers: list[Actor] = []
        self._wanted = options(self._job).servers
        self._start(self._wanted)
        self._closed = False
        self._asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="servers", daemon=True)
        self._thread.start()

    def scale(self, servers: int) -> None:
        """Asks for another number of servers; it is changed in the background."""
        self._wanted = servers
        self._asked.set()

    def status(self) -> list[dict[str, Any]]:
        """What each server holds and has counted, as last heard of."""
        found: list[dict[str, Any]] = wait_for(self._coordinator.servers.remote())
        return found

    def close(self) -> None:
        """Ends all of them."""
        self._closed = True
        self._asked.set()
        for actor in (*self._servers, self._evaluator):
            ray.kill(actor)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with suppress(RayError):  # they were ended, and the run with them
            present = wait_for(self._evaluator.begin.remote(self._wanted))
            while present is not None and not self._closed:
                self._start(present)
                if present != self._wanted:
                    present = self._cut_anew(present, self._wanted)
                    continue
                self._asked.wait()
                self._asked.clear()

    def _start(self, servers: int) -> None:
        """Starts servers until there are so many. The lead stays with the driver, the others are spread over the nodes."""
        while len(self._servers) < servers:
            number = len(self._servers)
            chosen: dict[str, Any] = {"max_concurrency": SERVER_THREADS, "num_cpus": options(self._job).server_cpus}
            if number > 0:
                chosen["scheduling_strategy"] = "SPREAD"
            arguments = number, self._spec.job, self._num_rows, self._coordinator, self._evaluator
            self._servers.append(start_here(Server, *arguments, options=chosen))

    def _cut_anew(self, present: int, wanted: int) -> int:
        """Gives the parameters to another number of servers, between two steps; returns how many there are then."""
        started_s = time.monotonic()
        self._start(wanted)
        if not self._are_up(present, wanted):
            self._end_all_but(present)
            return present
        table, _ = self._layout()
        states = self._handed_on(present)
        wait_for(self._coordinator.commit.remote(table + 1, cut_anew(states, wanted)))
        _, present = self._layout()  # nothing was committed if the servers were rolled back meanwhile
        self._end_all_but(present)
        if present == wanted:
            self._tell("reshard", servers=wanted, seconds=round(time.monotonic() - started_s, 3))
        return present

    def _layout(self) -> tuple[int, int]:
        while True:
            found: tuple[int, int] | None = wait_for(self._coordinator.layout.remote())
            if found is not None:
                return found

    def _are_up(self, present: int, wanted: int) -> bool:
        """Waits until all servers beyond the present ones run, so that nobody has to wait for them; False without room."""
        pending = [server.status.remote() for server in self._servers[present:wanted]]
        wait_s, deadline_s = self._job.scaling.wait_s, time.monotonic() + self._job.scaling.wait_s
        while pending and self._wanted == wanted and not self._closed:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
            if pending and time.monotonic() > deadline_s:
                self._wanted = present
                cpus = options(self._job).server_cpus
                self._tell("reshard_failed", servers=present, wanted=wanted, cpus=cpus, waited_s=wait_s)
        return self._wanted == wanted and not self._closed

    def _end_all_but(self, servers: int) -> None:
        for server in self._servers[servers:]:
            ray.kill(server)
        del self._servers[servers:]

    def _tell(self, kind: str, **details: Any) -> None:
        self._coordinator.record.remote([(None, {"kind": kind, "time": time.time(), **details})])

    def _handed_on(self, present: int) -> list[ShardState]:
        """The states of all servers once they have applied the same leases; from then on they take no more."""
        servers = self._servers[:present]
        while True:
            while not (wait_for(servers[0].drain.remote(True)) and wait_for(servers[0].quiet.remote())):
                time.sleep(POLL_S)
            states: list[ShardState] = wait_for([server.hand_on.remote() for server in servers])
            if all(state.applied == states[0].applied for state in states):
                return states
            # A push of a worker that was given up came late, or a server was just restored: let them settle.
            wait_for([server.take_back.remote() for server in servers])
            time.sleep(SETTLE_S)


def forget_what_will_be_done_again(job: Job, directory: RunDirectory) -> None:
    """Cuts metrics and ledger of a run back to its newest good checkpoint.

    What came after it will be done again, in another order and under other numbers, as the workers' paces have it.
    """
    rule = job.checkpoint
    found = CheckpointStore(directory.checkpoints, rule.keep, rule.monitor, rule.mode).load("latest")
    progress = Progress()
    if found is not None:
        known = {field.name for field in fields(Progress)}
        progress = Progress.from_json({name: value for name, value in found[0].progress.items() if name in known})
    directory.retain_steps(progress.clock, progress.step, record_clock)
