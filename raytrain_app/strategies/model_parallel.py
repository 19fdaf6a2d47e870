"""Replicas that are spread over several workers, trained in step with each other as `allreduce` does it.

A pool of workers holds one replica; the worker at each place of it has one part. Inside a replica torch's own model
parallelism moves what the parts need of each other. Between replicas, each worker adds up the gradients of its part with
its counterparts, the workers at the same place, exactly as whole replicas would. A lost worker takes its replica out of the
generation until the pool has replaced it; each worker of it then takes its part over from a counterpart.

A step counts on all workers or on none. Its last message, `_commit`, tells each worker that all have the sums, so whoever
has got it has applied the step; whoever has not, since a worker was lost just then, keeps the step until the next generation
knows whether anybody has, and then applies it too or forgets it.
"""

from __future__ import annotations

import json
import resource
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from raytrain_app.elastic.exchange import PeerLost, broadcast_bytes, collective
from raytrain_app.elastic.group import Group
from raytrain_app.elastic.progress import Metrics, Progress
from raytrain_app.elastic.reduce import Total
from raytrain_app.elastic.vault import VaultKeeper
from raytrain_app.errors import StorageError
from raytrain_app.job import ModelParallel as Ways
from raytrain_app.learners.sharded import ShardedLearner
from raytrain_app.state import TrainState
from raytrain_app.storage.parts import pack_part
from raytrain_app.strategies.allreduce import AllReduce
from raytrain_app.strategies.worker import Worker

NUM_FLAGS = 4


def train(worker: Worker) -> None:
    """Entry of a worker of `strategy: model_parallel`."""
    ModelParallel(worker).run()


@dataclass
class _Pending:
    """A step, or the end of an epoch, of which it is not known yet whether it counts.

    Attributes:
        clock: after it.
        total: what this worker and its counterparts have summed up.
        apply: takes it over.
    """

    clock: int
    total: Total
    apply: Callable[[], None]


class ModelParallel(AllReduce):
    """One worker's training."""

    def __init__(self, worker: Worker) -> None:
        self._part = cast(ShardedLearner, worker.learner)
        ways = cast(Ways, worker.job.strategy)
        self._parts = {"pipeline": ways.pipeline, "fsdp": ways.fsdp, "tensor": ways.tensor}
        super().__init__(worker)
        self._pending: _Pending | None = None
        self._sums: list[float] = []
        self._due = False

    # ---- generations ----

    def _take_over(self, group: Group) -> None:
        """Cuts the model for the new group, settles what was pending, and brings replicas that are behind up to date."""
        self._group = group
        self._part.connect(group.mesh, group.mates)
        pending = self._pending.clock if self._pending is not None else -1
        num_sums = self._part.layout.num_scores + 1
        known = group.share([self.link.clock, pending, *(self._sums or [0.0] * num_sums)])
        clock = int(known[:, 0].max())
        if self._pending is not None and pending == clock:  # somebody has applied it, so all had what it takes
            self._settle(known[int(known[:, 0].argmax()), 2:].tolist())
        self._pending = None
        there = (known[:, :2] == clock).any(dim=1).view(group.num_replicas, group.peers).all(dim=1).tolist()
        if clock < 0 or not any(there):
            if group.replica == 0:
                self._restore(lost=clock >= 0)
            there = [replica == 0 for replica in range(group.num_replicas)]
        if not all(there):
            source = there.index(True)
            mine = self._snapshot().to_bytes() if group.replica == source else None
            data = broadcast_bytes(mine, source, group.counterparts)
            if not there[group.replica]:
                self._load(TrainState.from_bytes(data))
        self.link.clock = self.progress.clock

    def _restore(self, lost: bool = False) -> None:
        """Goes on from the vault's snapshot or the newest good checkpoint: the worker at place 0 chooses for its replica.

        Without either it is the beginning, and state that is `lost`, since only some parts of it are left, is forgotten.
        """
        group, choice = self._group, {"clock": -1, "step": -1}
        if group.place == 0:
            clock = self._keeper.newest() if self._keeper is not None else None
            newest = max(self._store.steps(), default=-1)
            kept = self._keeper.get(clock) if self._keeper is not None and clock is not None else None
            if kept is not None and kept.progress["step"] >= newest:
                choice["clock"] = kept.progress["step"] + kept.progress["epoch"]
            elif (found := self._store.load("latest")) is not None:
                choice["step"] = found[1]
                for message in found[2]:
                    self.link.event("checkpoint_damaged", message=message)
        choice = json.loads(broadcast_bytes(json.dumps(choice).encode() if group.place == 0 else None, 0, group.mates))
        if choice["clock"] >= 0:
            kept = self._keeper.get(choice["clock"]) if self._keeper is not None else None
            if kept is None:
                raise PeerLost("a newer snapshot has taken the place of the one chosen")
            self._load(kept)
        elif choice["step"] >= 0 and (found := self._store.load(f"step-{choice['step']:08d}")) is not None:
            self._part.load_whole(found[0])
            self.progress = Progress.from_json(self.link.take_up(found[0].progress))
        elif lost:
            self._part.connect(group.mesh, group.mates, keep=False)
            self.progress = Progress()
        if group.rank == 0 and max(choice.values()) >= 0:
            self._tell_resume("memory" if choice["clock"] >= 0 else "checkpoint")

    # ---- steps ----

    def _commit(self, total: Total, apply: Callable[[], None]) -> None:
        """Sums up over the parts of the replica, agrees on the flags, and takes over what all workers have then."""
        self._pending = _Pending(self.progress.clock + 1, total, apply)
        due = self._group.rank == 0 and self._keeper is not None and self._keeper.due()
        clipped = self.job.train.clip_norm is not None and total.mean.numel() > 0
        norm = self._part.squared_norm(total.mean) if clipped else 0.0
        known = self._group.share([*total.flags, self._leaving, due, total.loss, total.correct, *total.extra, norm])
        total.flags = [int(flag) for flag in known[:, :NUM_FLAGS].amax(dim=0).tolist()]
        replicas = known.view(self._group.num_replicas, self._group.peers, -1)
        self._leaving = bool(replicas[self._group.replica, :, NUM_FLAGS].any())  # a replica goes as a whole
        self._due = bool(known[:, NUM_FLAGS + 1].any())
        self._settle(replicas[self._group.replica, :, NUM_FLAGS + 2 :].sum(dim=0).tolist())

    def _settle(self, sums: list[float]) -> None:
        """Takes over what is pending, with the replica's sums: scores, and the squared norm of the gradient."""
        assert self._pending is not None, "both callers know"
        pending, self._pending, self._sums = self._pending, None, sums
        pending.total.loss, pending.total.correct, *pending.total.extra = sums[:-1]
        self._part.gradient_norm = sums[-1] ** 0.5
        pending.apply()

    # ---- snapshots, checkpoints and the end ----

    def _make_keeper(self) -> VaultKeeper | None:
        info = self.link.info
        return VaultKeeper(self._worker.vault, info.place, info.peers) if self._worker.vault is not None else None

    def _snapshot_is_due(self) -> bool:
        return self._due and self._group.replica == 0

    def _checkpoint(self, metrics: Metrics | None = None) -> None:
        """Each worker of the first replica writes its part in the background; the first worker waits for all of them there."""
        group, step, progress = self._group, self.progress.step, self.link.with_unrecorded(self.progress.to_json())
        if group.replica > 0:
            return
        attempt = broadcast_bytes(uuid.uuid4().hex[:8].encode() if group.rank == 0 else None, 0, group.mates).decode()
        timeout_s, known = 2 * self.job.failure.heartbeat_s, dict(metrics or {})

        def write(data: bytes) -> str:
            self._store.save_part(step, attempt, group.place, data)
            if group.place > 0:
                return ""
            return self._store.publish_parts(step, attempt, group.peers, progress, known, timeout_s)

        try:
            self._saver.run(step, self._pack, write)
        except StorageError as error:
            self.link.event("checkpoint_failed", error=str(error))

    def _pack(self) -> bytes:
        assert self._group.mates is not None, "a replica in parts has them"
        with collective():
            return pack_part(self._part.tensors(), self._group.mates)

    def _finish(self, status: str) -> None:
        """Tells what memory the workers have taken; and if one was lost with the last checkpoint, it is made again."""
        peaks = self._group.share([_peak_bytes(self._part.device)])
        if self._group.rank == 0:
            self.link.event("memory", peak_bytes=[int(peak) for peak in peaks[:, 0].tolist()])
        self._saver.drain()
        missing = self._group.rank == 0 and self.progress.step not in self._store.steps()
        if self._group.share([missing]).any() and status != "stopped":
            self._checkpoint(self.progress.metrics)
        super()._finish(status)


def _peak_bytes(device: torch.device) -> int:
    """The most memory that this process has had: of its GPU, else in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
