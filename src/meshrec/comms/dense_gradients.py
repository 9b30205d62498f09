"""Averages the gradients of dense parameters: a communication hook of DDP.

It lets CPU ranks of one host read each other's memory, where DistributedDataParallel has gloo send through
sockets, see ``host_link``; and it may finish after the backward pass, when a pipeline has started the next
lookup.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from meshrec.comms.collectives import InFlight
from meshrec.comms.host_link import HostLink, links, open_link
from meshrec.comms.mesh import Axis

# R ranks

_NAME = "gradients of dense parameters"


class _Bucket(NamedTuple):
    """One bucket under way. ``parts``: of all ranks, the elements whose mean this rank takes; without a
    link the sum of all, which the buffer takes up.
    """

    buffer: Tensor
    parts: InFlight
    future: Any


class DenseGradients:
    """The state of ``average_gradients``; ``for_axis`` makes it.

    Attributes:
        is_late: see ``late``.
    """

    def __init__(self, link: HostLink | None, axis: Axis) -> None:
        self._link, self._axis = link, axis
        self._under_way: list[_Bucket] = []
        self.is_late = False

    @classmethod
    def for_axis(cls, axis: Axis, device: torch.device | None = None) -> "DenseGradients | None":
        """Make the state for the ranks of an axis; None for one rank. Collective.

        Args:
            axis: the ranks that average.
            device: where the gradients are; by default, the CPU.
        """
        group = axis.group
        if group is None or axis.size == 1:
            return None
        on_cpu = device is None or device.type == "cpu"
        if not on_cpu or links[group] is None:
            return cls(None, axis)
        # One of its own: buckets and exchanges of tables may take turns differently on each rank.
        return cls(open_link(group), axis)

    @property
    def has_link(self) -> bool:
        """Whether the ranks read each other's memory.

        If not, this hook is only worth its while for late means: DistributedDataParallel alone is as fast.
        """
        return self._link is not None

    @contextmanager
    def late(self) -> Iterator[None]:
        """Let backward passes inside end without the means: call ``finish`` before you read the gradients."""
        self.is_late = True
        try:
            yield
        except BaseException:
            self._under_way.clear()
            raise
        finally:
            self.is_late = False

    def start(self, buffer: Tensor) -> Future[Tensor]:
        """Offer this rank's gradients to the others."""
        future: Future[Tensor] = Future()
        if self._link is None:
            # What DistributedDataParallel does without a hook, in its order.
            buffer.mul_(1 / self._axis.size)
            work = dist.all_reduce(buffer, group=self._axis.group, async_op=True)
            parts = self._in_flight(buffer, work)
        else:
            sizes = self._sizes(buffer)
            received = buffer.new_empty(sizes[self._axis.rank] * self._axis.size)
            own = [sizes[self._axis.rank]] * self._axis.size
            reading = self._link.start(buffer, sizes, received, own, same=False)
            parts = self._in_flight(received, reading)
        self._under_way.append(_Bucket(buffer, parts, future))
        if self.is_late:
            future.set_result(buffer)  # which DistributedDataParallel takes for the mean already
        return future

    def finish(self) -> None:
        """Wait for every bucket: each rank averages its part, in the order of ranks, and all get all parts.

        Raises:
            CollectiveError: when a rank does not answer.
        """
        under_way, self._under_way = self._under_way, []
        link = self._link
        means = [bucket.parts if link is None else self._means(link, bucket) for bucket in under_way]
        for bucket, in_flight in zip(under_way, means, strict=True):
            mean = in_flight.wait()
            if not bucket.future.done():
                bucket.future.set_result(mean)

    def _means(self, link: HostLink, bucket: _Bucket) -> InFlight:
        terms = bucket.parts.wait().view(self._axis.size, -1)
        mean = terms[0] / self._axis.size
        for term in terms[1:]:
            mean.add_(term, alpha=1 / self._axis.size)
        sizes = [mean.numel()] * self._axis.size
        # Of this rank's buffer everybody has read what is now overwritten: it is in their means.
        reading = link.start(mean, sizes, bucket.buffer, self._sizes(bucket.buffer), same=True)
        return self._in_flight(bucket.buffer, reading)

    def _sizes(self, buffer: Tensor) -> list[int]:
        """Return [R], the number of elements that each rank averages."""
        return [part.numel() for part in buffer.tensor_split(self._axis.size)]

    def _in_flight(self, result: Tensor, work: object) -> InFlight:
        return InFlight(result, work, _NAME, self._axis.group)


def average_gradients(
    state: DenseGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over ranks, with the same bits on all of them.

    This is a hook for ``DistributedDataParallel.register_comm_hook``. Buckets are offered as they come, and
    read together with the last one: until then no rank waits.
    """
    future = state.start(bucket.buffer())
    if bucket.is_last() and not state.is_late:
        state.finish()
    return future
