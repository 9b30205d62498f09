"""Averages the gradients of dense parameters over CPU ranks of one host: a communication hook of DDP.

DistributedDataParallel otherwise has gloo send them through sockets, see ``host_link``.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from meshrec.comms.collectives import InFlight
from meshrec.comms.host_link import HostLink, links, open_link
from meshrec.plan.mesh import Axis

# R ranks

_NAME = "gradients of dense parameters"


class _Bucket(NamedTuple):
    """One bucket under way. ``parts``: of all ranks, the elements whose mean this rank takes."""

    buffer: Tensor
    parts: InFlight
    future: Any


class DenseGradients:
    """The state of ``average_on_host``; ``for_axis`` makes it."""

    def __init__(self, link: HostLink, axis: Axis) -> None:
        self._link, self._axis = link, axis
        self._under_way: list[_Bucket] = []

    @classmethod
    def for_axis(cls, axis: Axis) -> "DenseGradients | None":
        """None where the ranks have no link. Collective."""
        group = axis.group
        if group is None or axis.size == 1:
            return None
        if links[group] is None:
            return None
        # One of its own: buckets and exchanges of tables may take turns differently on each rank.
        link = open_link(group)
        return None if link is None else cls(link, axis)

    def start(self, buffer: Tensor) -> Future[Tensor]:
        """Offers this rank's gradients to the others."""
        sizes = self._sizes(buffer)
        received = buffer.new_empty(sizes[self._axis.rank] * self._axis.size)
        own = [sizes[self._axis.rank]] * self._axis.size
        reading = self._link.start(buffer, sizes, received, own, same=False)
        future: Future[Tensor] = Future()
        self._under_way.append(_Bucket(buffer, self._in_flight(received, reading), future))
        return future

    def finish(self) -> None:
        """Waits for all that was started: every rank takes the mean of its part, in the order of ranks, and
        all get all parts.

        Raises:
            CollectiveError: when a rank does not answer.
        """
        under_way, self._under_way = self._under_way, []
        means = []
        for buffer, parts, _ in under_way:
            terms = parts.wait().view(self._axis.size, -1)
            mean = terms[0] / self._axis.size
            for term in terms[1:]:
                mean.add_(term, alpha=1 / self._axis.size)
            sizes = [mean.numel()] * self._axis.size
            # Of this rank's buffer everybody has read what is now overwritten: it is in their means.
            reading = self._link.start(mean, sizes, buffer, self._sizes(buffer), same=True)
            means.append(self._in_flight(buffer, reading))
        for bucket, in_flight in zip(under_way, means, strict=True):
            bucket.future.set_result(in_flight.wait())

    def _sizes(self, buffer: Tensor) -> list[int]:
        """[R] the elements whose mean each rank takes."""
        return [part.numel() for part in buffer.tensor_split(self._axis.size)]

    def _in_flight(self, result: Tensor, reading: object) -> InFlight:
        return InFlight(result, reading, _NAME, self._axis.group)


def average_on_host(
    state: DenseGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """For ``DistributedDataParallel.register_comm_hook``: the mean over ranks, the same bits on all of them.

    Buckets are offered as they come, and read together with the last one: until then nobody waits.
    """
    future = state.start(bucket.buffer())
    if bucket.is_last():
        state.finish()
    return future
