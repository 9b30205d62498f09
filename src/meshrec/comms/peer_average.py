"""Average tensors over gloo ranks on several hosts, by point-to-point messages in a background thread.

Gloo's all-to-all sends the two directions one after the other: between two hosts it takes up to twice as long
as sending and receiving at the same time. Here, a thread waits for the messages, adds in rank order and sends
the means, while the program's threads continue.

[Note: messages of an average]
Every rank averages a share of the elements. The rank receives this share from all peers. These addends are
called *terms* (messages with ``terms_tag``). The rank sends their mean to the peers on its own host, and to a
single rank on every other host (``means_tag``). That rank passes the mean on within its host
(``passed_on_tag``), so links between hosts carry a mean once. Two ranks exchange all elements instead. Gloo
matches messages by sender, tag and order. The calling thread sends the terms, and the background thread sends
the means, hence the different tags.
"""

import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from meshrec.comms.collectives import InFlight, count_sent, wait_for_message
from meshrec.comms.failures import POLL_SECONDS, Listener, count_start
from meshrec.comms.mesh import Axis
from meshrec.comms.phase_clock import recorders
from meshrec.ops import operators

_FIRST_TAG = 1 << 20
"""First message tag for averages, above the tags of all other messages in the group."""
_BLOCK = 1 << 14
"""Elements per kernel call. So few that the kernel runs on the calling thread, without a thread pool."""
_num_averages: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()
"""Number of PeerAverage objects created per group. Each has other tags, as threads may send in any order."""


# Measured with 3.5 MB between two hosts at 100 Mb/s: 302 ms, and 582 ms with gloo's all-to-all.
class PeerAverage:
    """Averages of tensors over the ranks on an axis, computed one after another in a thread.

    All ranks must create their objects in the same order, because the order determines the message tags.

    Attributes:
        terms_tag, means_tag, passed_on_tag: message tags; see [Note: messages of an average].
    """

    def __init__(self, axis: Axis, hosts: Sequence[str], name: str) -> None:
        self.group: Any = axis.group
        # All ranks create their objects in the same order, so the tags match.
        number = _num_averages[self.group] = _num_averages.get(self.group, 0) + 1
        first_tag = _FIRST_TAG + 3 * number
        self.terms_tag, self.means_tag, self.passed_on_tag = range(first_tag, first_tag + 3)
        self.rank, self.size, self.routes = axis.rank, axis.size, Routes(hosts)
        self._name = name
        # Averages for the thread to compute. The thread starts with the first average, and ends at None.
        self._jobs: queue.SimpleQueue[_TensorAverage | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None)  # ends the thread, which holds the queue only

    def start(self, sent: Tensor) -> InFlight:
        """Start to average a 1-D tensor over all ranks. Collective.

        Args:
            sent: this rank's tensor. It must not be modified before the wait.

        Returns:
            The running collective, whose result is the mean.
        """
        count_start(self.group)
        # Posts all receives and sends of the terms in this thread, in the same order on all ranks.
        job = _TensorAverage(self, sent)
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
            tag: message tag; see [Note: messages of an average].

        Returns:
            A list with a torch work object to wait for per receiver; empty for an empty tensor.
        """
        # The receiver knows the size, too, and does not wait for an empty message.
        if not tensor.numel():
            return []
        count_sent(self._name, len(ranks) * tensor.nbytes)
        return [self.group.send([tensor], rank, tag) for rank in ranks]

    def receive(self, tensor: Tensor, rank: int, tag: int) -> list[Any]:
        """Start to receive a tensor from a rank.

        Args:
            tensor: tensor to fill; for an empty tensor, nothing is received.
            tag: message tag; see [Note: messages of an average].

        Returns:
            A list with the torch work object to wait for; empty for an empty tensor.
        """
        return [self.group.recv([tensor], rank, tag)] if tensor.numel() else []


class Routes:
    """Senders and receivers of every mean; see [Note: messages of an average].

    The *owner* of a mean is the rank which computes it.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        # Ranks on every host, ascending.
        self._on_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            self._on_host.setdefault(host, []).append(rank)

    def receiver(self, owner: int, host: str) -> int | None:
        """Return the rank on ``host`` which receives a mean from its owner, and passes it on within the host.

        Return None if ``host`` is the owner's host. Different owners on a host use different receivers, as
        far as there are enough ranks.
        """
        if host == self._hosts[owner]:
            return None
        ranks = self._on_host[host]
        # The owner's position on its host selects the receiver, which spreads the load.
        return ranks[self._on_host[self._hosts[owner]].index(owner) % len(ranks)]

    def source(self, owner: int, rank: int) -> int:
        """Return the rank from which ``rank`` receives the owner's mean.

        This is the owner, or another rank on the host of ``rank``, which passes the mean on.
        """
        receiver = self.receiver(owner, self._hosts[rank])
        return owner if receiver is None or receiver == rank else receiver

    def targets(self, owner: int, sender: int) -> list[int]:
        """Return the ranks to which ``sender`` sends ``owner``'s mean, ascending."""
        ranks = range(len(self._hosts))
        return [rank for rank in ranks if rank != owner and self.source(owner, rank) == sender != rank]


class _TensorAverage:
    """The average of one tensor.

    The constructor starts to send this rank's terms, the addends for the means which other ranks compute. The
    background thread receives terms, computes this rank's mean, and exchanges the means.

    Attributes:
        mean: the result, complete after ``wait``.
    """

    def __init__(self, average: PeerAverage, sent: Tensor) -> None:
        self._average, self._rank, self._size = average, average.rank, average.size
        self.mean: Tensor = operators.new_buffer(sent, sent.numel())
        # Set by the background thread, after it has written ``mean`` or ``_error``.
        self._done = threading.Event()
        self._error: Exception | None = None
        # Every rank starts with another peer, so that messages do not all go to the same rank first.
        peers = [(self._rank + step) % self._size for step in range(1, self._size)]
        if self._size == 2:
            shares, self._target = {peers[0]: sent, self._rank: sent}, self.mean
        else:
            shares = dict(enumerate(sent.tensor_split(self._size)))
            self._target = self.mean.tensor_split(self._size)[self._rank]
        local_share = shares[self._rank]
        self._terms: dict[int, Tensor] = {self._rank: local_share}
        # Post receives before sends. A sender then finds a posted receive, and need not ask the peer first.
        self._receiving: list[Any] = []
        for rank in reversed(peers):
            self._terms[rank] = operators.new_buffer(local_share, local_share.numel())
            self._receiving += average.receive(self._terms[rank], rank, average.terms_tag)
        # Also keeps the sent tensors alive until the messages have been sent.
        self._sending = [
            work for rank in peers for work in average.send(shares[rank], [rank], average.terms_tag)
        ]

    def run(self) -> None:
        """Receive terms, average them, and exchange the means. Runs on the background thread.

        An error is stored for ``wait``.
        """
        try:
            self._wait(self._receiving)
            terms = [self._terms[rank] for rank in range(self._size)]
            pieces = zip(*(term.split(_BLOCK) for term in terms), strict=True)
            # Writes to ``mean`` directly: it is this rank's share, or everything with two ranks.
            for target, piece in zip(self._target.split(_BLOCK), pieces, strict=True):
                operators.average_ranks(target, list(piece), self._size)
            if self._size > 2:
                self._distribute()
            self._wait(self._sending)
        except Exception as error:
            self._error = error
        finally:
            self._done.set()
            # Free the received terms, also after an error.
            self._terms.clear()

    def wait(self) -> None:
        """Wait until ``mean`` is complete."""
        listener: Listener | None = None
        while not self._done.wait(POLL_SECONDS):
            listener = listener or Listener(dist.get_process_group_ranks(self._average.group))
            listener.check()
        if self._error is not None:
            raise self._error

    def _distribute(self) -> None:
        """Send this rank's mean, receive all other means, and pass means on within the host."""
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
                self._wait(receiving[owner])
                receiving[owner] = []
                self._sending += average.send(shares[owner], targets, average.passed_on_tag)
        # Means which this rank does not pass on.
        for works in receiving.values():
            self._wait(works)

    def _wait(self, works: list[Any]) -> None:
        """Wait until all these messages have been sent or received."""
        for work in works:
            wait_for_message(work, self._average.group)


def _run(jobs: "queue.SimpleQueue[_TensorAverage | None]") -> None:
    """Compute the averages in the queue until None; the function of the background thread.

    It has no reference to the PeerAverage, because deleting that object must end the thread.
    """
    while (job := jobs.get()) is not None:
        job.run()
        del job  # an idle thread must not keep the last buffers
