"""How the gradients of DistributedDataParallel travel over gloo: as the segments of `elastic.segments`.

There a member that dies is told of at once, and not in gloo's all-reduce when a message is partly through.

Annotations are not postponed here, since DistributedDataParallel compares those of its hooks with classes.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytrain_app.elastic.segments import Members, Segment, cut


@dataclass
class _Bucket:
    """A bucket's segments, where its mean will be, and who waits for it."""

    segments: list[Segment]
    mean: torch.Tensor
    future: torch.futures.Future[torch.Tensor]


class BucketExchange:
    """Averages buckets on CPUs over all workers: the same bits on each, and those of no other number of workers.

    Buckets are sent while backward fills the next one. Then they are summed, and their means are sent; what is called when
    follows from the buckets alone, as all must make the same calls in the same order.

    Args:
        rank: of this worker among all.
        world_size: their number.
        dtype: of the gradients.
    """

    def __init__(self, rank: int, world_size: int, dtype: torch.dtype) -> None:
        covers = [[(worker, worker + 1)] for worker in range(world_size)]
        self._members = Members(rank, covers, dtype, dtype, torch.device("cpu"), None)
        self._cuts: dict[int, tuple[list[Segment], torch.Tensor]] = {}
        self._sent: deque[_Bucket] = deque()
        self._shared: deque[_Bucket] = deque()
        self._last: list[list[Segment]] = []  # of buckets before they were arranged anew, whose packets may still be under way

    def reduce(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """The communication hook: takes a bucket's gradients, (size,), whose mean over the workers is to come in the future.

        Raises:
            PeerLost: a member is gone.
        """
        gradients, future = bucket.buffer(), torch.futures.Future[torch.Tensor]()
        segments, mean = self._cut(bucket.index(), gradients.numel())
        for segment in segments:
            segment.expect_sums()
            segment.fill(0, gradients[segment.place])
            segment.send_sums()
        self._sent.append(_Bucket(segments, mean, future))
        while len(self._sent) > (0 if bucket.is_last() else 1):
            self._average(self._sent[0].segments)
            self._last.clear()  # who sends gradients of this step has all of the last one
            self._shared.append(self._sent.popleft())
        while bucket.is_last() and self._shared:
            for segment in self._shared[0].segments:
                segment.receive_means()
            done = self._shared.popleft()
            done.future.set_result(done.mean)
        if bucket.is_last():
            self._cuts = {number: cuts for number, cuts in self._cuts.items() if number <= bucket.index()}
        return future

    def _cut(self, number: int, size: int) -> tuple[list[Segment], torch.Tensor]:
        """The segments of a bucket and its mean. DistributedDataParallel arranges its buckets anew after the first step."""
        known = self._cuts.get(number)
        if known is None or len(known[1]) != size:
            if known is not None:
                self._last.append(known[0])
            known = self._cuts[number] = cut(self._members, size, 0)
            for segment in known[0]:
                segment.fit([0] * self._members.world_size)
        return known

    def _average(self, segments: list[Segment]) -> None:
        """Receives the gradients of all, adds them up in the order of the workers, and begins to send their mean."""
        for segment in segments:
            segment.receive_sums()
            first, second, *others = segment.sums.values()
            torch.add(first, second, out=segment.mean)
            for other in others:
                segment.mean.add_(other)
            segment.mean.mul_(1 / self._members.world_size)
            segment.send_means()
