"""`drill`: trains a job under a random schedule of real faults, then without, and checks that nothing tells them apart."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from raytrain_app import runner
from raytrain_app.cluster.local import LocalNodes
from raytrain_app.cluster.nodes import living_nodes
from raytrain_app.errors import JobError
from raytrain_app.faults import Injector, plan_faults
from raytrain_app.job import Job
from raytrain_app.report.updates import Update
from raytrain_app.session import NAMESPACE, ray_session
from raytrain_app.storage.audit import EpochAudit, audit_run, summary
from raytrain_app.storage.folder import Folder

FEW = 12
"""Faults that are told one by one."""


@dataclass
class DrillResult:
    """What a drill found.

    Attributes:
        disturbed, calm: result.json of the two runs.
        faults: what was done, in order.
        audit: of the disturbed run, by epoch.
        same_bits: both runs must end with the same weights.
    """

    disturbed: dict[str, Any]
    calm: dict[str, Any]
    faults: list[dict[str, Any]]
    audit: list[EpochAudit]
    same_bits: bool = True

    @property
    def broken(self) -> list[str]:
        """The promises that were broken, as sentences."""
        broken = []
        if self.same_bits and self.disturbed["weights_sha256"] != self.calm["weights_sha256"]:
            broken.append("the weights differ from those of the undisturbed run")
        metrics = ("train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy") if self.same_bits else ()
        broken += [f"{name} differs" for name in (*metrics, "steps", "samples") if self.disturbed[name] != self.calm[name]]
        broken += [epoch.sentence() for epoch in self.audit if not epoch.exact]
        return broken

    def lines(self) -> list[str]:
        """The findings for people."""
        pauses: dict[str, list[float]] = {}
        for receipt in self.disturbed["disruptions"]:
            pauses.setdefault(receipt["cause"], []).append(receipt["paused_s"])
        lines = [
            f"faults           {_told(self.faults)}",
            f"weights          {self.disturbed['weights_sha256'][:16]} disturbed, {self.calm['weights_sha256'][:16]} calm",
            *(f"audit            {line}" for line in summary(self.audit)),
            *(f"pauses           {cause}: {_spread(found)}" for cause, found in pauses.items()),
            f"steps redone     {self.disturbed['steps_redone']:,} of {self.disturbed['steps']:,}",
            f"goodput          {self.disturbed['goodput']:.2f} disturbed, {self.calm['goodput']:.2f} calm",
        ]
        return lines + [f"BROKEN           {sentence}" for sentence in self.broken]


@contextmanager
def local_nodes(job: Job, count: int) -> Iterator[LocalNodes]:
    """Nodes on this machine that together have just room for the job's largest number of workers, and Ray connected to them."""
    each = math.ceil(job.scaling.workers.max / job.replica_workers / count) * job.replica_workers
    resources = {name: math.ceil(amount * each) for name, amount in job.scaling.resources_per_worker.items()}
    with LocalNodes(count, resources) as nodes:
        ray.init(address=nodes.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        try:
            while len(living_nodes()) < count + 1:
                time.sleep(0.1)
            yield nodes
        finally:
            ray.shutdown()


def drill(
    job: Job,
    counts: Mapping[str, int],
    seed: int,
    *,
    address: str | None = None,
    num_nodes: int = 2,
    on_update: Callable[[Update], None] | None = None,
) -> DrillResult:
    """Trains the job twice, disturbed and calm, with audit.

    Args:
        job: what to train; its name gets suffixes.
        counts: how many faults of which of `faults.KINDS`.
        seed: of the schedule.
        address: a running cluster to do it on; None makes `num_nodes` nodes on this machine.
        num_nodes: see there.
        on_update: told of both runs.

    Raises:
        JobError: nodes cannot be lost on a cluster that is not the drill's own.
    """
    if address is not None and any(counts.get(kind) for kind in ("drain", "node")):
        raise JobError("--drain and --node take machines away; they work on the drill's own nodes, without --address")
    base = f"{job.name}-drill-{seed}"
    names = {"disturbed": f"{base}-disturbed", "calm": f"{base}-calm"}
    # The drill's own faults must not use up what the job bears.
    failure = job.failure.model_copy(update={"max_restarts": job.failure.max_restarts + sum(counts.values())})
    changes = {"audit": True, "failure": failure}
    jobs = {kind: job.model_copy(update={"name": name, **changes}) for kind, name in names.items()}
    tell = on_update or (lambda _: None)
    if address is not None:
        with ray_session(address):
            return _both(jobs, counts, seed, None, tell)
    with local_nodes(job, num_nodes) as nodes:
        return _both(jobs, counts, seed, nodes, tell)


def _both(
    jobs: Mapping[str, Job], counts: Mapping[str, int], seed: int, nodes: LocalNodes | None, tell: Callable[[Update], None]
) -> DrillResult:
    calm = runner.run(jobs["calm"], on_update=tell)
    most, unit = jobs["calm"].scaling.workers.max, jobs["calm"].replica_workers
    directory = Folder.open(jobs["disturbed"].storage).child(jobs["disturbed"].name)
    injector = Injector(plan_faults(seed, counts, calm.record["steps"]), seed, directory.uri, most, nodes, unit)

    def watch(update: Update) -> None:
        injector.watch(update)
        tell(update)

    disturbed = runner.run(jobs["disturbed"], on_update=watch)
    injector.join()
    same_bits = jobs["calm"].same_bits
    return DrillResult(disturbed.record, calm.record, injector.committed, audit_run(directory), same_bits)


def _told(faults: Sequence[Mapping[str, Any]]) -> str:
    """Faults one by one if they are few, else how many of which kind."""
    if len(faults) <= FEW:
        done = [f"{fault['kind']} at step {fault['step']}" for fault in faults if "skipped" not in fault]
    else:
        done = [f"{count} {kind}" for kind, count in Counter(f["kind"] for f in faults if "skipped" not in f).items()]
    skipped = sum("skipped" in fault for fault in faults)
    return (", ".join(done) or "none") + (f"; {skipped} more found nobody to strike" if skipped else "")


def _spread(seconds: list[float]) -> str:
    return f"{len(seconds)}, median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
