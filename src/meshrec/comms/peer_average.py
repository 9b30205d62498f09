"""Average over gloo ranks without a host link, by point-to-point messages.

Gloo's all-to-all sends the two directions one after the other: between two hosts it takes up to twice as long
as messages sent and received at once. A thread waits for the messages, adds in rank order and sends
the means, while the program's threads continue.

[Note: messages of an average]
Every rank averages a share of the elements. The rank receives this share from all peers (``terms_tag``), and
sends the mean to the peers on the local host and to a single rank per remote host (``means_tag``). The remote
rank passes the mean on within the host (``passed_on_tag``), so links between hosts carry a mean once. Two
ranks exchange all elements instead. Gloo matches messages by sender, tag and order. Terms are therefore sent
by the caller, and means by the thread, with different tags.
"""

import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from meshrec.comms.collectives import InFlight, count_sent
from meshrec.comms.failures import POLL_SECONDS, Listener, count_start
from meshrec.comms.mesh import Axis
from meshrec.comms.phase_clock import recorders
from meshrec.ops import operators

_FIRST_TAG = 1 << 20
"""Above the tags for other messages in the group."""
_BLOCK = 1 << 14
"""Elements per kernel call: so few that the kernel runs on the calling thread, without a pool."""
_num_averages: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()
"""PeerAverage count per group. All have separate tags, because threads may send in any order."""


class PeerAverage:
    """Averages tensors over the ranks on an axis, one tensor after another. The constructor is collective.

    Args:
        axis: participating ranks, on a gloo group.
        hosts: host name per rank.
        name: collective name, for errors and ``measure_traffic``.
    """

    def __init__(self, axis: Axis, hosts: Sequence[str], name: str) -> None:
        self.group: Any = axis.group
        number = _num_averages[self.group] = _num_averages.get(self.group, 0) + 1
        first_tag = _FIRST_TAG + 3 * number
        self.terms_tag, self.means_tag, self.passed_on_tag = range(first_tag, first_tag + 3)
        self.rank, self.size, self.routes = axis.rank, axis.size, Routes(hosts)
        self._name = name
        # Read by the thread, which starts with the first average and ends at None.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None)  # ends the thread, which holds the queue only

    def start(self, sent: Tensor) -> InFlight:
        """Start to average a 1-D tensor. Do not modify it before the wait. Collective."""
        count_start(self.group)
        job = _Job(self, sent)
        if self._thread is None:
            # A daemon: a rank may exit when the peers are gone.
            self._thread = threading.Thread(
                target=_run, args=(self._jobs,), name="dense gradients", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)
        in_flight = InFlight(job.mean, job, self._name, self.group)
        if recorders and not recorders[0].overlap:
            in_flight.wait()
        return in_flight

    def send(self, tensor: Tensor, ranks: Sequence[int], tag: int) -> list[Any]:
        """Start to send a tensor to some ranks.

        Args:
            tensor: tensor to send; an empty tensor is not sent.
            ranks: receivers, as ranks in the group.
            tag: message tag; see [Note: messages of an average].

        Returns:
            A work object per receiver, to wait for.
        """
        if not tensor.numel():
            return []
        count_sent(self._name, len(ranks) * tensor.nbytes)
        return [self.group.send([tensor], rank, tag) for rank in ranks]

    def receive(self, tensor: Tensor, rank: int, tag: int) -> list[Any]:
        """Start to receive a tensor from a rank.

        Args:
            tensor: tensor to fill; for an empty tensor, nothing is received.
            rank: sender, as a rank in the group.
            tag: message tag; see [Note: messages of an average].

        Returns:
            A work object to wait for, in a list; no element for an empty tensor.
        """
        return [self.group.recv([tensor], rank, tag)] if tensor.numel() else []


class Routes:
    """Sender and receivers for every share's mean; see [Note: messages of an average].

    A mean's owner is the rank computing it.

    Args:
        hosts: host name per rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._on_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            self._on_host.setdefault(host, []).append(rank)

    def receiver(self, owner: int, host: str) -> int | None:
        """Return the rank on ``host`` which receives an owner's mean and passes it on.

        None on the owner's host.
        """
        if host == self._hosts[owner]:
            return None
        ranks = self._on_host[host]
        return ranks[self._on_host[self._hosts[owner]].index(owner) % len(ranks)]

    def source(self, owner: int, rank: int) -> int:
        """Return the rank sending an owner's mean to ``rank``."""
        receiver = self.receiver(owner, self._hosts[rank])
        return owner if receiver is None or receiver == rank else receiver

    def targets(self, owner: int, sender: int) -> list[int]:
        """Return the ranks to which ``sender`` sends ``owner``'s mean, ascending."""
        ranks = range(len(self._hosts))
        return [rank for rank in ranks if rank != owner and self.source(owner, rank) == sender != rank]


class _Job:
    """A tensor with an average in flight; ``wait`` returns when ``mean`` is complete."""

    def __init__(self, average: PeerAverage, sent: Tensor) -> None:
        self._average, self._rank, self._size = average, average.rank, average.size
        self.mean: Tensor = operators.new_buffer(sent, sent.numel())
        self._done = threading.Event()
        self._error: Exception | None = None
        peers = [(self._rank + step) % self._size for step in range(1, self._size)]
        if self._size == 2:
            shares, self._target = {peers[0]: sent, self._rank: sent}, self.mean
        else:
            shares = dict(enumerate(sent.tensor_split(self._size)))
            self._target = self.mean.tensor_split(self._size)[self._rank]
        local_share = shares[self._rank]
        self._terms: dict[int, Tensor] = {self._rank: local_share}
        # Receive first: a sender then need not ask whether the peer is ready.
        self._receiving: list[Any] = []
        for rank in reversed(peers):
            self._terms[rank] = operators.new_buffer(local_share, local_share.numel())
            self._receiving += average.receive(self._terms[rank], rank, average.terms_tag)
        self._sending = [
            work for rank in peers for work in average.send(shares[rank], [rank], average.terms_tag)
        ]

    def run(self) -> None:
        """Receive, average, and send the means. Runs on the thread."""
        try:
            _wait(self._receiving)
            terms = [self._terms[rank] for rank in range(self._size)]
            pieces = zip(*(term.split(_BLOCK) for term in terms), strict=True)
            for target, piece in zip(self._target.split(_BLOCK), pieces, strict=True):
                operators.average_ranks(target, list(piece), self._size)
            if self._size > 2:
                self._distribute()
            _wait(self._sending)
        except Exception as error:
            self._error = error
        finally:
            self._done.set()
            self._terms.clear()

    def wait(self) -> None:
        """Wait until ``mean`` is complete.

        Raises:
            RuntimeError: a message failed, or another rank has failed alone.
        """
        listener: Listener | None = None
        while not self._done.wait(POLL_SECONDS):
            listener = listener or Listener(dist.get_process_group_ranks(self._average.group))
            listener.check()
        if self._error is not None:
            raise self._error

    def _distribute(self) -> None:
        """Send this rank's mean, receive the others, and pass them on within the host."""
        shares, average, routes = self.mean.tensor_split(self._size), self._average, self._average.routes
        owners = [owner for owner in range(self._size) if owner != self._rank]
        receiving: dict[int, list[Any]] = {}
        for owner in owners:
            source = routes.source(owner, self._rank)
            tag = average.means_tag if source == owner else average.passed_on_tag
            receiving[owner] = average.receive(shares[owner], source, tag)
        targets = routes.targets(self._rank, self._rank)
        self._sending += average.send(shares[self._rank], targets, average.means_tag)
        # A mean to pass on comes from the share's owner, so no rank waits here for a rank passing means on.
        for owner in owners:
            if targets := routes.targets(owner, self._rank):
                _wait(receiving[owner])
                receiving[owner] = []
                self._sending += average.send(shares[owner], targets, average.passed_on_tag)
        for works in receiving.values():
            _wait(works)


def _wait(works: list[Any]) -> None:
    """Wait for all messages."""
    for work in works:
        work.wait()


def _run(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    """Run jobs until None. Runs on the thread: it must not hold the PeerAverage, whose deletion stops it."""
    while (job := jobs.get()) is not None:
        job.run()
        del job  # an idle thread must not keep the last buffers
