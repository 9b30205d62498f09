"""Average the gradients of dense parameters over ranks, as a DistributedDataParallel (DDP) communication
hook.

On CPUs, gradients are added in rank order, so the bits of the result depend neither on the placement of ranks
nor on host links (``host_link``). gloo's all-reduce adds in another order. Every rank averages a share of the
elements, and sends the means to all ranks. Two ranks without a link exchange all elements instead, which
takes the same number of bytes in one exchange instead of two.

The hook finishes at the end of the backward pass, so that the backward pass of tables does not wait for it.
Without a link, a thread computes averages meanwhile (``peer_average``). In a pipeline, the hook may finish
even later, when the next lookup has started.
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
    """A gradient bucket from DDP whose average is being computed."""

    buffer: Tensor  # the gradients, flat; overwritten by the means
    sent: Tensor
    """The gradients in the dtype of the exchange; may be ``buffer`` itself."""
    terms: InFlight
    """Running exchange. It returns the gradients from all ranks for this rank's share of the elements. With
    NCCL or a `PeerAverage`, it returns the means.
    """
    future: Any  # DDP waits for it


class DenseGradients:
    """State of the DDP hook `average_gradients` for a model. Create it with ``for_axis``.

    Args:
        link: host link through which ranks on the same host read each other's gradients; None: no link.
        peers: sends gradients in point-to-point messages. None: the link or a collective sends them.

    Attributes:
        is_deferred: whether the gradients are averaged by a call of ``finish`` after the backward pass; see
            ``deferred``.
        adds_in_order: whether gradients are added in rank order. NCCL selects the order itself.
        dtype: dtype in which gradients are exchanged; None: the gradients' dtype.
        ends_with_backward: whether buckets are averaged in a callback at the end of the backward pass, and
            not in the hook for the last bucket. Set before the first step. It must be False if DDP has a
            static graph: DDP then calls the hooks in a final callback, which would wait for a later callback
            forever.
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
        # At most one of ``link`` and ``peers`` is set: averages go through peer memory, or through messages.
        self._link, self._axis, self.dtype, self._peers = link, axis, dtype, peers
        self.adds_in_order = adds_in_order
        # Buckets between start() and finish(), in hook order.
        self._in_progress: list[_Bucket] = []
        self.is_deferred = False
        self.ends_with_backward = False

    @classmethod
    def for_axis(
        cls, axis: Axis, device: torch.device | None = None, *, dtype: torch.dtype | None = None
    ) -> "DenseGradients | None":
        """Create the state for the ranks on an axis. Return None for a single rank. Collective.

        Args:
            device: device of the gradients; CPU by default.
            dtype: dtype in which gradients are exchanged; None: the gradients' dtype. CPU ranks add in fp32
                and round the mean. NCCL adds in this dtype.
        """
        group = axis.group
        if group is None or axis.size == 1:
            return None
        on_cpu = device is None or device.type == "cpu"
        if not on_cpu or links[group] is None:
            peers = None
            # PeerAverage sends point-to-point messages through gloo.
            if on_cpu and is_gloo(group):
                peers = PeerAverage(axis, hosts_of_ranks(group), DENSE_GRADIENTS)
            # Without a host link: sockets between hosts, or NCCL on GPUs.
            return cls(None, axis, adds_in_order=on_cpu, dtype=dtype, peers=peers)
        # A separate link: buckets and table exchanges may interleave differently on every rank, and a link
        # needs the same order everywhere.
        return cls(open_link(group), axis, dtype=dtype)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Context for a backward pass whose gradients are averaged only in a later call of ``finish``."""
        self.is_deferred = True
        try:
            yield
        except BaseException:
            self.forget()
            raise
        finally:
            self.is_deferred = False

    def start(self, buffer: Tensor) -> Future[Tensor]:
        """Start to average a bucket, by sending this rank's gradients.

        Args:
            buffer: gradients in the bucket, 1-D; overwritten by the means.

        Returns:
            Future which DDP waits for.
        """
        future: Future[Tensor] = Future()
        # Elements of every rank's share, and this rank's share once per peer.
        sizes = self._sizes(buffer)
        local_sizes = [sizes[self._axis.rank]] * self._axis.size
        if not self.adds_in_order:
            # The same operations in the same order as DistributedDataParallel without a hook, for equal bits.
            buffer.mul_(1 / self._axis.size)
        # NCCL adds in this dtype: the scaling above keeps the sum in range. CPU ranks add in fp32.
        sent = buffer if self.dtype is None else buffer.to(self.dtype)
        # NCCL: a plain all-reduce of the scaled gradients.
        if not self.adds_in_order:
            work = dist.all_reduce(sent, group=self._axis.group, async_op=True)
            terms = self._in_flight(sent, work)
        elif self._link is not None:
            # Peers read the gradients from this rank's memory.
            terms = self._in_flight(None, self._link.start(sent, sizes, None, local_sizes, same=False))
        elif self._peers is not None:
            terms = self._peers.start(sent)
        # Both ranks send everything and average on their own: one exchange instead of two.
        elif self._axis.size == 2:
            sizes = [0, buffer.numel()] if self._axis.rank == 0 else [buffer.numel(), 0]
            terms = all_to_all(sent, Splits(sizes, sizes), self._axis, DENSE_GRADIENTS)
        else:
            terms = all_to_all(sent, Splits(sizes, local_sizes), self._axis, DENSE_GRADIENTS)
        self._in_progress.append(_Bucket(buffer, sent, terms, future))
        if self.is_deferred:
            # DDP must not wait in the backward pass, so let it treat the buffer as averaged already.
            future.set_result(buffer)
        return future

    def forget(self) -> None:
        """Drop buckets which a failed backward pass has left."""
        self._in_progress.clear()

    def finish(self) -> None:
        """Wait for the averages of all buckets, and write them to the buffers. Collective.

        Raises:
            CollectiveError: a rank does not respond.
        """
        # Forget the buckets first: after an error, the next step must not finish them.
        in_progress, self._in_progress = self._in_progress, []
        has_means = not self.adds_in_order or self._peers is not None
        # Start to send all means before waiting for any, so exchanges of different buckets overlap.
        means = [bucket.terms if has_means else self._average_and_send(bucket) for bucket in in_progress]
        for bucket, in_flight in zip(in_progress, means, strict=True):
            mean = in_flight.wait()
            # The means may be in another tensor or dtype than DDP's buffer.
            if mean is not bucket.buffer:
                bucket.buffer.copy_(mean)
            # A late bucket's future was set in ``start``, when DDP must not wait.
            if not bucket.future.done():
                bucket.future.set_result(bucket.buffer)

    def _average_and_send(self, bucket: _Bucket) -> InFlight:
        """Wait for the gradients from all ranks, average this rank's share, and start to send the means.

        Returns:
            Running exchange, which returns the means for the whole bucket.
        """
        size, rank, sent = self._axis.size, self._axis.rank, bucket.sent
        average = operators.average_ranks
        # Two ranks exchange all elements, so no second message with means is needed.
        if self._link is None and size == 2:
            peer_gradients = bucket.terms.wait()
            # In rank order on both ranks, for equal bits.
            average(sent, [sent, peer_gradients] if rank == 0 else [peer_gradients, sent], size)
            return self._in_flight(sent, None)
        sizes = self._sizes(sent)
        local_sizes = [sizes[rank]] * size
        mean: Tensor = operators.new_buffer(sent, sizes[rank])
        if self._link is None:
            average(mean, list(bucket.terms.wait().view(size, -1)), size)
            return all_to_all(mean, Splits(local_sizes, sizes), self._axis, DENSE_GRADIENTS, same=True)

        def read(_: Tensor, link: int, exchange: int) -> Tensor:
            """Average this rank's share of the elements directly from the memory of the peers.

            Args:
                _: unused, because messages are not copied on a host link.
                link: host link handle.
                exchange: exchange number.

            Returns:
                Means for this rank's share, 1-D.
            """
            average(mean, [], size, link, exchange)
            return mean

        bucket.terms.wait_and_compute(read)
        # The means may overwrite ``sent``, although peers read from it: a peer sends the means for its share
        # only after it has read this share.
        return self._in_flight(sent, self._link.start(mean, local_sizes, sent, sizes, same=True))

    def _sizes(self, buffer: Tensor) -> list[int]:
        """Return the number of elements which each rank averages, [R]."""
        return list(map(Tensor.numel, buffer.tensor_split(self._axis.size)))

    def _in_flight(self, result: Tensor | None, work: object) -> InFlight:
        """Return a running collective with the name of this module, for errors."""
        return InFlight(result, work, DENSE_GRADIENTS, self._axis.group)


def average_gradients(
    state: DenseGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Communication hook for DDP: average gradients over ranks, with equal bits on all ranks.

    Register it with ``DistributedDataParallel.register_comm_hook``. The hook sends a bucket once its
    gradients are ready. It averages all buckets after the last bucket, so no rank waits for a peer earlier.
    """
    # The first bucket of a backward pass.
    if bucket.index() == 0:
        state.forget()  # averages left by a failed backward pass
    future = state.start(bucket.buffer())
    if bucket.is_last() and not state.is_deferred:
        if state.ends_with_backward:
            # DistributedDataParallel queues the callback waiting for the futures after this hook, and
            # callbacks run in order.
            torch.autograd.Variable._execution_engine.queue_callback(state.finish)
        else:
            state.finish()
    return future
