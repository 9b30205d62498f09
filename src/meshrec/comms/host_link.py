"""Exchange messages between CPU ranks on the same host by reading each other's memory, without sockets.

Gloo uses TCP sockets even within a host. A *host link* replaces gloo collectives for a process group whose
ranks all run on the same Linux host and may read each other's memory. The ranks find this out together in the
group's first collective. If a link is not possible, a log line explains why. Results are bit-identical with
and without a link. ``MESHREC_HOST_LINK=0`` on any rank disables links. ``MESHREC_HOST=NAME`` names a rank's
host: ranks with different names count as different hosts, to test multi-node setups on a single machine.

A *board* is a small area of shared memory. Every rank has a board, in which it publishes how many exchanges
it has started and read, and the addresses of its messages.

[Note: why ranks may read each other's memory]

A rank reads with ``process_vm_readv``, which the system allows between a user's processes (with Yama,
after the ``prctl`` in csrc/host/host_link.cpp). Ranks never write to peer memory. The reads are safe because

1. all ranks start the same exchanges in the same order, and number them. A rank writes message addresses to
its board before it increments the number of started exchanges, so readers never see a partial entry;
2. a message is neither modified nor freed before all ranks have read it. ``HostLink.sent`` keeps it alive
until the boards confirm this. Collectives therefore receive private tensors, never the caller's;
3. a board carries a random token, so a process reusing a dead peer's PID is detected;
4. a dead peer makes the read fail, and a hung peer hits the process group's timeout. Both raise on the
reader; other ranks are informed as in [Note: how errors reach every rank] (comms/agreement.py);
5. a forked child forgets the link, because it belongs to the parent. At exit, a rank waits some seconds until
peers have read the last messages.
"""

import ctypes
import logging
import multiprocessing.util
import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.comms.failures import Listener
from meshrec.ops import operators
from meshrec.ops.library import c_entry_points

_logger = logging.getLogger("meshrec")
_SWITCH = "MESHREC_HOST_LINK"
_HOST_NAME = "MESHREC_HOST"
_FAILED, _NOT_YET = -1, -2  # C function results, as in csrc/host/host_link.h
_PEER_LOST = "the memory of a peer could not be read"  # prefix of kPeerLost in csrc/host/host_link.h
_LEAVING_SECONDS = 5.0  # time at exit for peers to read the last messages
# As kErrorBytes in csrc/host/host_link.cpp.
_ERROR_BYTES = 256
_MANY = 8  # exchanges in flight above which `start` looks for abandoned exchanges
# Number of later exchanges after which `start` reads an exchange that nobody has waited for. A quarter of
# kSlots in csrc/host/host_link.cpp, after which peers could start no exchange.
_OLD = 64
_INT, _POINTER, _NUMBER = ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "create": (_POINTER, [_INT, _INT, _NUMBER, _POINTER, _POINTER, _POINTER]),
    "join": (_INT, [_POINTER, _INT, _INT, _INT, _NUMBER, _NUMBER, _POINTER]),
    "start": (_INT, [_POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER]),
    "wait": (_INT, [_POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER]),
    "arrive": (_INT, [_POINTER, _INT, _POINTER, _INT, _POINTER]),
    "unread": (_INT, [_POINTER]),
    "skip": (_INT, [_POINTER, _INT]),
    "close": (None, [_POINTER, ctypes.c_double]),
}


class _Refused(OSError):
    """A link is not possible, for the reason in the message. The group then uses gloo."""


class Address(NamedTuple):
    """Location of a rank's board, the shared memory area that peers map; see the module docstring."""

    pid: int
    descriptor: int
    """File descriptor of the memory in the rank's process."""
    address: int
    """Address of the board in the rank's memory."""
    token: int
    """Random number in the board, by which peers notice that another process has reused the PID."""


@dataclass(eq=False)
class Reading:
    """An exchange which has started on a host link. ``wait`` fills ``result``.

    If the object is dropped without a wait, a later exchange tells the peers that this rank will not read
    their messages.
    """

    link: "HostLink"
    number: int
    """Number of the exchange on the link."""
    result: Tensor
    """Messages from all ranks, valid after ``wait``. Empty before if ``wait`` allocates it."""
    sizes: Any
    """Number of elements from each rank, as a C array."""
    num_elements: int
    """Number of elements from all ranks."""
    is_finished: bool = False
    """Whether ``wait`` has been called."""
    is_read_early: bool = False
    """Whether ``result`` has the messages although nobody has asked for them; see ``read_early``."""

    def read_early(self) -> None:
        """Copy the messages before somebody waits for them, so that peers need not keep them any longer."""
        self.wait()
        self.is_read_early = True

    def wait(self, reader: Callable[[Tensor, int, int], Tensor] | None = None) -> None:
        """Wait until all peers have started the exchange, and copy their messages to ``result``.

        Args:
            reader: function which computes the result directly from the memory of the peers, instead of the
                copy. Arguments: the empty result, the link handle, and the exchange number; if the messages
                have been copied early, the messages, 0 and 0.

        Raises:
            RuntimeError: a peer died, or did not respond within the process group's timeout; the link then
                has a ``failure``. Errors from ``reader`` are raised unchanged.
        """
        if self.is_read_early:
            if reader is not None:
                self.result = reader(self.result, 0, 0)
            return
        # ``arrive`` waits without copying, ``wait`` also copies the messages.
        link, deadline, name = self.link, 0.0, "arrive"
        listener: Listener | None = None
        # Also after an error: the exchange is over for this rank.
        self.is_finished = True
        if link.failure:
            raise RuntimeError(link.failure)
        arguments: tuple[Any, ...] = self.sizes, self.result.element_size(), link.error
        try:
            if reader is None:
                # Allocated only now, so the memory is free while the exchange is in flight.
                if self.result.numel() != self.num_elements:
                    self.result = operators.new_buffer(self.result, self.num_elements)
                name, arguments = "wait", (self.result.data_ptr(), *arguments)
            # The C function returns after a short wait, so this loop can look for failed peers and the
            # deadline.
            while (outcome := link.functions[name](link.handle, self.number, *arguments)) == _NOT_YET:
                deadline = deadline or time.monotonic() + link.timeout_seconds
                listener = listener or Listener(link.ranks)
                link.check(deadline, listener)
            if outcome == _FAILED:
                link.failure = link.error.value.decode()
                raise RuntimeError(link.failure)
            if reader is not None:
                self.result = reader(self.result, link.handle or 0, self.number)
                # The reader has read the messages in place. Tell the peers that they may free them.
                outcome = link.functions["skip"](link.handle, self.number)
        except BaseException as error:
            if _PEER_LOST in str(error):
                link.failure = _PEER_LOST
            # A local failure, such as missing memory. Tell peers that this rank will not read the messages,
            # so they can free them.
            if not link.failure:
                link.functions["skip"](link.handle, self.number)
            raise
        # The outcome is the number of messages which some peer has not read yet.
        # Exchanges are numbered in the order in which they start, so unread messages are always the latest in
        # the deque.
        while len(link.sent) > outcome:
            link.sent.popleft()


class HostLink:
    """Connection between the ranks of a process group on one host, which read each other's memory.

    Create it with `open_link`. All ranks must start the same exchanges in the same order, but may wait for
    them in any order. A message must not be modified before all ranks have read it. The link keeps it alive
    until then.

    Args:
        rank: this rank's position in the group.
        size: number of ranks in the group.
        timeout_seconds: maximum wait for a peer.

    Raises:
        OSError: the system does not allow reading other processes' memory.
    """

    def __init__(self, rank: int, size: int, timeout_seconds: float) -> None:
        # set_timeout() may change the timeout later.
        self.functions, self.timeout_seconds = _functions(), timeout_seconds
        self.failure = ""
        """Reason why the link can no longer be used; empty while it can."""
        # The C functions write their error message here.
        self.error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.sent: deque[Tensor] = deque()
        """Messages which some rank has not read yet, oldest first."""
        self.ranks: Sequence[int] = ()
        """Global ranks in the group. If they announce an error, a wait ends. Set by ``open_link``."""
        # A C array type for sizes, and (number, reading) for exchanges which may still be waited for.
        self._sizes, self._in_progress = _INT * size, list[tuple[int, weakref.ref[Reading]]]()
        # 63 bits: the token travels as a signed 64-bit integer.
        token, descriptor, address = secrets.randbits(63), _INT(), _NUMBER()
        outputs = ctypes.byref(descriptor), ctypes.byref(address)
        self.handle: int | None = self.functions["create"](rank, size, token, *outputs, self.error)
        if self.handle is None:
            raise OSError(self.error.value.decode())
        self.address = Address(os.getpid(), descriptor.value, address.value, token)

    def join(self, addresses: Sequence[Address]) -> None:
        """Connect to the boards of all other ranks.

        Raises:
            OSError: the system does not allow reading other processes' memory.
        """
        for rank, address in enumerate(addresses):
            # This rank's own board is mapped already.
            if address == self.address:
                continue
            if self.functions["join"](self.handle, rank, *address, self.error) == _FAILED:
                raise OSError(self.error.value.decode())

    def start(
        self,
        message: Tensor,
        sent: Sequence[int],
        result: Tensor | None,
        received: Sequence[int],
        *,
        same: bool,
    ) -> Reading:
        """Start an exchange, which sends ``sent[p]`` elements to rank p and receives ``received[p]`` from it.

        Args:
            message: elements to send, not modified until all ranks have read them.
            sent: number of elements to each rank.
            result: tensor to fill; None: ``Reading.wait`` allocates it.
            received: number of elements from each rank.
            same: whether all ranks get the start of the message, instead of consecutive slices.

        Raises:
            RuntimeError: too many exchanges are in flight, and a peer does not read them within the timeout.
        """
        if self.failure:
            raise RuntimeError(self.failure)
        message, number, deadline = message.contiguous(), _INT(), 0.0
        listener: Listener | None = None
        arguments = message.data_ptr(), self._sizes(*sent), message.element_size(), same, ctypes.byref(number)
        while (num_unread := self.functions["start"](self.handle, *arguments)) == _NOT_YET:
            deadline = deadline or time.monotonic() + self.timeout_seconds
            listener = listener or Listener(self.ranks)
            self.check(deadline, listener)
            # The board is full, because a peer is many exchanges behind. This is rare, so polling is enough.
            time.sleep(1e-3)
        self.sent.append(message)
        while len(self.sent) > num_unread:
            self.sent.popleft()
        # An empty tensor with the dtype; `Reading.wait` allocates the memory.
        if result is None:
            result = message.new_empty(0)
        # From here on, the caller owns the exchange. If it drops the object, _skip_dropped() notices.
        reading = Reading(self, number.value, result, self._sizes(*received), sum(received))
        # Usually few exchanges are in flight, so the search costs nothing.
        if len(self._in_progress) >= _MANY:
            self._skip_dropped(number.value)
        # A weak reference, so that dropping the reading is noticed.
        self._in_progress.append((number.value, weakref.ref(reading)))
        return reading

    def release_read(self) -> None:
        """Free the sent messages which all ranks have read."""
        num_unread = 0 if self.failure else self.functions["unread"](self.handle)
        while len(self.sent) > num_unread:
            self.sent.popleft()

    def check(self, deadline: float, listener: Listener) -> None:
        """Raise RuntimeError if the deadline has passed, or if a peer has announced an error."""
        try:
            listener.check()
        except RuntimeError as error:
            self.failure = str(error)
            raise
        if time.monotonic() > deadline:
            self.failure = f"a peer did not answer within {self.timeout_seconds:g} s"
            raise RuntimeError(self.failure)

    def close(self) -> None:
        """Close the link once peers have read the last messages, or after ``_LEAVING_SECONDS``."""
        # Closing twice does nothing.
        handle, self.handle = self.handle, None
        if handle is not None:
            # After a failure, do not wait for peers.
            self.functions["close"](handle, 0.0 if self.failure else _LEAVING_SECONDS)
        self.failure = self.failure or "the link to the other ranks is closed"
        self.sent.clear()

    def forget(self) -> None:
        """Make the link unusable in a forked child process, because it belongs to the parent."""
        self.handle, self.failure = None, "the link to the other ranks belongs to the parent process"

    def _skip_dropped(self, newest: int) -> None:
        """Tell peers about exchanges this rank has dropped without a wait, so they free the messages.

        Read old exchanges that may still be waited for, such as the next batch of a pipeline whose model is
        evaluated meanwhile. All ranks start the same exchanges, so peers have started these long ago.
        """
        pending = []
        for number, reference in self._in_progress:
            reading = reference()
            if reading is None:
                self.functions["skip"](self.handle, number)
            elif not reading.is_finished:
                pending.append((number, reference))
        self._in_progress = pending
        # With many exchanges in flight, nobody seems to wait for any: let the board fill, which is an error.
        if len(pending) < _OLD // 2:
            for number, reference in pending:
                reading = reference()
                if reading is not None and newest - number > _OLD:
                    reading.read_early()


class _LazyLinks(dict["weakref.ref[dist.ProcessGroup]", HostLink | None]):
    """Dict from process groups to host links. The first access to a group opens its link. Collective.

    The value is None if the group uses gloo.
    """

    def __missing__(self, reference: "weakref.ref[dist.ProcessGroup]") -> HostLink | None:
        group = reference()
        assert group is not None
        links[group] = link = open_link(group)
        return link


links: "WeakKeyDictionary[dist.ProcessGroup, HostLink | None]" = WeakKeyDictionary()
"""The host link of every process group; None if the group uses gloo. The first ``links[group]`` opens the
link, and is collective. ``links.get(group)`` never opens a link.
"""
links.data = _LazyLinks()  # type: ignore[attr-defined]  # a hit stays in C
_open_links: "weakref.WeakSet[HostLink]" = weakref.WeakSet()


def open_links() -> list[HostLink]:
    """Return all host links in this process which have been opened and not freed."""
    return list(_open_links)


def open_link(group: dist.ProcessGroup) -> HostLink | None:
    """Open a host link between the ranks in a group. Return None if the group must use gloo. Collective.

    Raises:
        RuntimeError: a rank does not respond. The error comes from the backend.
    """
    # A subclass, such as a slow group in tests, wants separate collectives.
    link = link_or_reason(group)[0] if is_gloo(group) else None
    if link is not None:
        link.ranks = dist.get_process_group_ranks(group)
        _open_links.add(link)
        # Runs when the group is collected, or at exit.
        # Not atexit, which processes started by multiprocessing skip.
        multiprocessing.util.Finalize(group, link.close, exitpriority=0)
    return link


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether gloo itself runs the group's CPU collectives, and not a subclass or a wrapper."""
    if type(group) is not dist.ProcessGroup:
        return False
    backend: Any = group._get_backend(torch.device("cpu"))
    return bool(backend.name() == "gloo")


def hosts_of_ranks(group: dist.ProcessGroup) -> list[str]:
    """Return a host identifier for every rank in a group, equal for ranks on the same host. Collective."""
    (hosts,) = _gather_items(group, (_host_id(),))
    return list(hosts)


def link_or_reason(group: dist.ProcessGroup) -> tuple[HostLink | None, str]:
    """Open a host link between the ranks in a gloo group. Collective.

    Returns:
        The link and an empty string, or None and the reason if a link is not possible. All ranks get a link,
        or none.
    """
    # For the timeout of the group.
    backend: Any = group._get_backend(torch.device("cpu"))
    link, refusal = None, ""
    try:
        if os.environ.get(_SWITCH) == "0":
            raise _Refused(f"{_SWITCH}=0 switches it off")
        link = HostLink(group.rank(), group.size(), backend.options._timeout.total_seconds())
    except OSError as error:
        refusal = str(error)
    # All ranks must decide alike, so exchange the reasons before anybody joins.
    hosts, addresses, refusals = _gather_items(group, (_host_id(), link and link.address, refusal))
    # Equal on all ranks, because it is computed from gathered values: all enter the second exchange, or none.
    is_one_host = len(set(hosts)) == 1
    if link is not None and is_one_host and not any(refusals):
        try:
            link.join(addresses)
        except OSError as error:
            refusal = str(error)
        # A second exchange, because joining may fail on some ranks only.
        (refusals,) = _gather_items(group, (refusal,))
        if not any(refusals):
            return link, ""
    if link is not None:
        link.close()
    reason = ", ".join(f"rank {rank}: {why}" for rank, why in enumerate(refusals) if why)
    # Several hosts are normal and need no warning.
    if group.rank() == 0 and is_one_host:
        _logger.warning(
            "the %d ranks of a process group are on one host but send messages through gloo's sockets, which "
            "is slower than reading each other's memory (%s)",
            group.size(),
            reason,
        )
    return None, reason if is_one_host else "they are on several hosts"


def _gather_items(group: dist.ProcessGroup, mine: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Gather tuples from all ranks, and transpose them. Collective.

    Returns:
        For every position in the tuple, a tuple with the values from all ranks.
    """
    items: list[Any] = [None] * group.size()
    dist.all_gather_object(items, mine, group=group)
    return list(zip(*items, strict=True))


def _host_id() -> str:
    """Return an identifier of this host: ``MESHREC_HOST`` if it is set, else the kernel's boot ID.

    Without ``MESHREC_HOST``, the result is empty outside Linux.
    """
    if named := os.environ.get(_HOST_NAME):
        return named
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text() if path.exists() else ""


def _functions() -> dict[str, Any]:
    """Return the C functions of the compiled library, by their names without the prefix."""
    library = c_entry_points()
    if library is None:
        raise _Refused("no compiled kernels")
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"meshrec_link_{name}", None)
        if function is None:
            raise _Refused("the compiled kernels have no links: they are for Linux")
        # Without declared types, ctypes would truncate pointers to 32 bits.
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


def _forget_links() -> None:
    """Make all links unusable. Runs in a forked child process."""
    for link in _open_links:
        link.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_links)
