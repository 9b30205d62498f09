"""Averages the gradients of dense parameters: a communication hook of DDP.

Gradients are added in the order of ranks. So the bits depend neither on where ranks run nor on whether they
read each other's memory (``host_link``); gloo's all-reduce adds in another order. Each rank averages a part
of the elements and sends its means to all. Two ranks without a link send each other everything instead: as
many bytes, in one exchange instead of two. The hook may finish after the backward pass, when a pipeline has
started the next lookup.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from meshrec.comms.collectives import InFlight, Splits, all_to_all
from meshrec.comms.host_link import HostLink, links, open_link
from meshrec.comms.mesh import Axis

# R ranks

DENSE_GRADIENTS = "gradients of dense parameters"
"""The name of this collective in errors and in ``measure_traffic``."""


class _Bucket(NamedTuple):
    """A bucket of gradients under way."""

    buffer: Tensor
    terms: InFlight
    """The elements of other ranks that this rank averages; without ``adds_in_order``, the means."""
    future: Any


class DenseGradients:
    """The state of ``average_gradients``; ``for_axis`` makes it.

    Attributes:
        is_late: see ``late``.
        adds_in_order: whether gradients are added in the order of ranks. NCCL adds them itself.
    """

    def __init__(self, link: HostLink | None, axis: Axis, *, adds_in_order: bool = True) -> None:
        self._link, self._axis = link, axis
        self.adds_in_order = adds_in_order
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
            return cls(None, axis, adds_in_order=on_cpu)
        # One of its own: buckets and exchanges of tables may take turns differently on each rank.
        return cls(open_link(group), axis)

    @contextmanager
    def late(self) -> Iterator[None]:
        """Let backward passes end before gradients are averaged: call ``finish`` before you read them."""
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
        sizes = self._sizes(buffer)
        own = [sizes[self._axis.rank]] * self._axis.size
        if not self.adds_in_order:
            # What DistributedDataParallel does without a hook, in its order.
            buffer.mul_(1 / self._axis.size)
            work = dist.all_reduce(buffer, group=self._axis.group, async_op=True)
            terms = self._in_flight(buffer, work)
        elif self._link is not None:
            terms = self._in_flight(None, self._link.start(buffer, sizes, None, own, same=False))
        elif self._axis.size == 2:
            sizes = [0, buffer.numel()] if self._axis.rank == 0 else [buffer.numel(), 0]
            terms = all_to_all(buffer, Splits(sizes, sizes), self._axis, DENSE_GRADIENTS)
        else:
            terms = all_to_all(buffer, Splits(sizes, own), self._axis, DENSE_GRADIENTS)
        self._under_way.append(_Bucket(buffer, terms, future))
        if self.is_late:
            future.set_result(buffer)  # which DistributedDataParallel takes for the mean already
        return future

    def finish(self) -> None:
        """Wait for every bucket, and fill it with the means over all ranks.

        Raises:
            CollectiveError: when a rank does not answer.
        """
        under_way, self._under_way = self._under_way, []
        means = [self._means(bucket) if self.adds_in_order else bucket.terms for bucket in under_way]
        for bucket, in_flight in zip(under_way, means, strict=True):
            mean = in_flight.wait()
            if mean is not bucket.buffer:
                bucket.buffer.copy_(mean)
            if not bucket.future.done():
                bucket.future.set_result(bucket.buffer)

    def _means(self, bucket: _Bucket) -> InFlight:
        """Compute this rank's share of the means, and start to exchange shares if there are several."""
        size, rank, buffer = self._axis.size, self._axis.rank, bucket.buffer
        average = torch.ops.meshrec.average_ranks.default
        if self._link is None and size == 2:
            other = bucket.terms.wait()
            average(buffer, [buffer, other] if rank == 0 else [other, buffer], size)
            return self._in_flight(buffer, None)
        sizes = self._sizes(buffer)
        own = [sizes[rank]] * size
        mean: Tensor = torch.ops.meshrec.new_buffer.default(buffer, sizes[rank])
        if self._link is None:
            average(mean, list(bucket.terms.wait().view(size, -1)), size)
            return all_to_all(mean, Splits(own, sizes), self._axis, DENSE_GRADIENTS, same=True)

        def read(_: Tensor, link: int, exchange: int) -> Tensor:
            average(mean, [], size, link, exchange)
            return mean

        bucket.terms.use(read)
        # All ranks that fill the buffer below have read what they need of it: they send means of it.
        return self._in_flight(buffer, self._link.start(mean, own, buffer, sizes, same=True))

    def _sizes(self, buffer: Tensor) -> list[int]:
        """Return [R], the number of elements that each rank averages."""
        return [part.numel() for part in buffer.tensor_split(self._axis.size)]

    def _in_flight(self, result: Tensor | None, work: object) -> InFlight:
        return InFlight(result, work, DENSE_GRADIENTS, self._axis.group)


def average_gradients(
    state: DenseGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over ranks, with the same bits on all of them.

    This is a hook for ``DistributedDataParallel.register_comm_hook``. It publishes each bucket when its
    gradients are ready. No rank waits for another before the last bucket, when all buckets are averaged.
    """
    future = state.start(bucket.buffer())
    if bucket.is_last() and not state.is_late:
        state.finish()
    return future
