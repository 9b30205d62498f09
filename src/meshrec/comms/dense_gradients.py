"""Average dense gradients over ranks, as a DDP communication hook.

Gradients are added in rank order, so the result bits depend neither on rank placement nor on host links
(``host_link``); gloo's all-reduce adds in another order. Every rank averages a share of the elements and
sends the means to all. Two ranks without a link exchange all elements instead: equally many bytes, in one
exchange instead of two. The hook finishes at the end of the backward pass, so that the tables' backward and
exchange do not wait; without a link, a thread averages meanwhile (``peer_average``). With pipelining, the
hook may finish even later, when the next lookup has started.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from meshrec.comms.collectives import InFlight, Splits, all_to_all
from meshrec.comms.host_link import HostLink, hosts_of_ranks, is_gloo, links, open_link
from meshrec.comms.mesh import Axis
from meshrec.comms.peer_average import PeerAverage
from meshrec.ops import operators

# Shape legend: R ranks.

DENSE_GRADIENTS = "gradients of dense parameters"
"""Collective name in errors and in ``measure_traffic``."""


class _Bucket(NamedTuple):
    """A DDP gradient bucket with an average in flight."""

    buffer: Tensor  # the gradients, flat; finally the means
    sent: Tensor
    """The buffer in the exchange dtype; may be the buffer itself."""
    terms: InFlight
    """Gradients from all ranks for this rank's share; without ``adds_in_order`` or with a `PeerAverage`, the
    means.
    """
    future: Any  # awaited by DDP


class DenseGradients:
    """State for the hook ``average_gradients``. Create it with ``for_axis``.

    Attributes:
        is_late: whether gradients are averaged in ``finish``, after the backward pass; see ``late``.
        adds_in_order: whether gradients are added in rank order. NCCL selects the order itself.
        dtype: exchange dtype; None: the gradients' dtype.
        ends_with_backward: whether buckets are averaged at the end of the backward pass instead of in the
            last bucket's hook. DistributedDataParallel with a static graph calls hooks in a final callback in
            the backward pass, which would wait for a later callback forever. Set before the first step.
    """

    def __init__(
        self,
        link: HostLink | None,
        axis: Axis,
        *,
        adds_in_order: bool = True,
        dtype: torch.dtype | None = None,
        peers: PeerAverage | None = None,
    ) -> None:
        self._link, self._axis, self.dtype, self._peers = link, axis, dtype, peers
        self.adds_in_order = adds_in_order
        # Buckets between start() and finish(), in hook order.
        self._in_progress: list[_Bucket] = []
        self.is_late = False
        self.ends_with_backward = False

    @classmethod
    def for_axis(
        cls, axis: Axis, device: torch.device | None = None, *, dtype: torch.dtype | None = None
    ) -> "DenseGradients | None":
        """Create the state for the ranks on an axis. Returns None for a single rank. Collective.

        Args:
            axis: participating ranks.
            device: gradient device; CPU by default.
            dtype: exchange dtype; None: the gradients' dtype. CPU ranks add in
                fp32 and round the mean; NCCL adds in this dtype.
        """
        group = axis.group
        if group is None or axis.size == 1:
            return None
        on_cpu = device is None or device.type == "cpu"
        if not on_cpu or links[group] is None:
            peers = None
            if on_cpu and is_gloo(group):
                peers = PeerAverage(axis, hosts_of_ranks(group), DENSE_GRADIENTS)
            return cls(None, axis, adds_in_order=on_cpu, dtype=dtype, peers=peers)
        # A separate link: buckets and table exchanges may interleave differently on every rank, and a link
        # needs the same order everywhere.
        return cls(open_link(group), axis, dtype=dtype)

    @contextmanager
    def late(self) -> Iterator[None]:
        """Within the context, average gradients only when ``finish`` is called, after the backward pass."""
        self.is_late = True
        try:
            yield
        except BaseException:
            self.forget()
            raise
        finally:
            self.is_late = False

    def start(self, buffer: Tensor) -> Future[Tensor]:
        """Start a bucket's average: make this rank's gradients available to peers."""
        future: Future[Tensor] = Future()
        sizes = self._sizes(buffer)
        local_sizes = [sizes[self._axis.rank]] * self._axis.size
        if not self.adds_in_order:
            # Same operations, in the same order, as DistributedDataParallel without a hook.
            buffer.mul_(1 / self._axis.size)
        sent = buffer if self.dtype is None else buffer.to(self.dtype)
        if not self.adds_in_order:
            work = dist.all_reduce(sent, group=self._axis.group, async_op=True)
            terms = self._in_flight(sent, work)
        elif self._link is not None:
            terms = self._in_flight(None, self._link.start(sent, sizes, None, local_sizes, same=False))
        elif self._peers is not None:
            terms = self._peers.start(sent)
        elif self._axis.size == 2:
            sizes = [0, buffer.numel()] if self._axis.rank == 0 else [buffer.numel(), 0]
            terms = all_to_all(sent, Splits(sizes, sizes), self._axis, DENSE_GRADIENTS)
        else:
            terms = all_to_all(sent, Splits(sizes, local_sizes), self._axis, DENSE_GRADIENTS)
        self._in_progress.append(_Bucket(buffer, sent, terms, future))
        if self.is_late:
            future.set_result(buffer)  # releases DDP, which treats the buffer as averaged
        return future

    def forget(self) -> None:
        """Drop the buckets from a failed backward pass."""
        self._in_progress.clear()

    def finish(self) -> None:
        """Wait for the averages for all buckets, and write them to the buffers.

        Raises:
            CollectiveError: a rank does not answer.
        """
        # Forget the buckets first: after an error, the next step must not finish them.
        in_progress, self._in_progress = self._in_progress, []
        has_means = not self.adds_in_order or self._peers is not None
        means = [bucket.terms if has_means else self._means(bucket) for bucket in in_progress]
        for bucket, in_flight in zip(in_progress, means, strict=True):
            mean = in_flight.wait()
            if mean is not bucket.buffer:
                bucket.buffer.copy_(mean)
            if not bucket.future.done():
                bucket.future.set_result(bucket.buffer)

    def _means(self, bucket: _Bucket) -> InFlight:
        """Average this rank's element share, and start to send the means to all ranks."""
        size, rank, sent = self._axis.size, self._axis.rank, bucket.sent
        average = operators.average_ranks
        if self._link is None and size == 2:
            peer_gradients = bucket.terms.wait()
            average(sent, [sent, peer_gradients] if rank == 0 else [peer_gradients, sent], size)
            return self._in_flight(sent, None)
        sizes = self._sizes(sent)
        local_sizes = [sizes[rank]] * size
        mean: Tensor = operators.new_buffer(sent, sizes[rank])
        if self._link is None:
            average(mean, list(bucket.terms.wait().view(size, -1)), size)
            return all_to_all(mean, Splits(local_sizes, sizes), self._axis, DENSE_GRADIENTS, same=True)

        def read(_: Tensor, link: int, exchange: int) -> Tensor:
            """Average this rank's share from the peers' memory.

            Args:
                _: unused: on a host link the messages are never assembled.
                link: host link handle.
                exchange: exchange number.

            Returns:
                The means for this rank's share, 1-D.
            """
            average(mean, [], size, link, exchange)
            return mean

        bucket.terms.use(read)
        # The buffer may be overwritten: a peer sends means only after reading the peer's share.
        return self._in_flight(sent, self._link.start(mean, local_sizes, sent, sizes, same=True))

    def _sizes(self, buffer: Tensor) -> list[int]:
        """Return the element count averaged per rank, [R]."""
        return list(map(Tensor.numel, buffer.tensor_split(self._axis.size)))

    def _in_flight(self, result: Tensor | None, work: object) -> InFlight:
        """Return a collective in flight with this module's name."""
        return InFlight(result, work, DENSE_GRADIENTS, self._axis.group)


def average_gradients(
    state: DenseGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over ranks, with equal bits on all ranks.

    A hook for ``DistributedDataParallel.register_comm_hook``. It publishes a bucket when the gradients are
    ready. All buckets are averaged after the last bucket, so no rank waits for a peer earlier; see
    ``ends_with_backward``.
    """
    if bucket.index() == 0:
        state.forget()  # averages left by a failed backward pass
    future = state.start(bucket.buffer())
    if bucket.is_last() and not state.is_late:
        if state.ends_with_backward:
            # DistributedDataParallel queues the callback waiting for the futures after this hook, and
            # callbacks run in order.
            torch.autograd.Variable._execution_engine.queue_callback(state.finish)
        else:
            state.finish()
    return future
