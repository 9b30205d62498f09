"""Exchange messages between CPU ranks on a host by reading peer memory, without sockets.

Gloo uses TCP sockets even within a host. A link replaces gloo collectives for a process group whose ranks all
run on the same Linux host and may read each other's memory. The ranks determine this together in the group's
first collective; if no link is possible, a log line explains why. Results are bit-identical.
``MESHREC_HOST_LINK=0`` on any rank disables links. ``MESHREC_HOST=NAME`` names a rank's host: ranks with
different names count as different hosts, to test multi-node setups on a single machine.

[Note: why ranks may read each other's memory]

A rank reads with ``process_vm_readv``, which the system allows between a user's processes (with Yama,
after the ``prctl`` in csrc/host/host_link.cpp). Ranks never write to peer memory. The reads are safe because

1. all ranks start the same exchanges in the same order, and number them. A rank publishes message addresses
on the board before it increments the started exchange count, so readers never see a partial entry;
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
_ERROR_BYTES = 256
_MANY = 8  # exchanges in flight above which `start` looks for abandoned exchanges
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
    """A link is not possible. A log line gives the reason, and the group uses gloo."""


class Address(NamedTuple):
    """A rank's board location (see csrc/host/host_link.cpp): process, file descriptor, address, and the token
    in the board.
    """

    pid: int
    descriptor: int
    address: int
    token: int


@dataclass(eq=False)
class Reading:
    """An exchange in flight on a link; ``wait`` fills ``result``.

    Dropping it without a wait does not delay the peers for long.
    """

    link: "HostLink"
    number: int
    result: Tensor
    """Result. Empty before ``wait`` if ``wait`` allocates it, which keeps the memory free until then."""
    sizes: Any
    """Element count per source rank, a C array."""
    num_elements: int
    """Element count from all ranks."""
    is_finished: bool = False

    def wait(self, make: Callable[[Tensor, int, int], Tensor] | None = None) -> None:
        """Wait until the result has arrived.

        Args:
            make: computes the result from peer memory, after all peers have started the exchange. Called with
                the empty result, the link handle, and the exchange number.

        Raises:
            RuntimeError: a peer died, or does not answer within the process group timeout; the link
                then has a ``failure``. Or ``make`` raised, without a link failure.
        """
        link, deadline, name = self.link, 0.0, "arrive"
        listener: Listener | None = None
        self.is_finished = True
        if link.failure:
            raise RuntimeError(link.failure)
        arguments: tuple[Any, ...] = self.sizes, self.result.element_size(), link.error
        try:
            if make is None:
                if self.result.numel() != self.num_elements:
                    self.result = operators.new_buffer(self.result, self.num_elements)
                name, arguments = "wait", (self.result.data_ptr(), *arguments)
            while (outcome := link.functions[name](link.handle, self.number, *arguments)) == _NOT_YET:
                deadline = deadline or time.monotonic() + link.timeout_seconds
                listener = listener or Listener(link.ranks)
                link.check(deadline, listener)
            if outcome == _FAILED:
                link.failure = link.error.value.decode()
                raise RuntimeError(link.failure)
            if make is not None:
                self.result = make(self.result, link.handle or 0, self.number)
                outcome = link.functions["skip"](link.handle, self.number)
        except BaseException as error:
            if _PEER_LOST in str(error):
                link.failure = _PEER_LOST
            # A local failure, such as missing memory: let peers release their messages.
            if not link.failure:
                link.functions["skip"](link.handle, self.number)
            raise
        while len(link.sent) > outcome:
            link.sent.popleft()


class HostLink:
    """Connection between process group ranks which read peer memory; see ``open_link``.

    All ranks start the same exchanges in the same order, and wait for them in any order. A message must not
    be modified before all ranks have read it; the link keeps it alive until then.

    Args:
        rank: this rank in the group.
        size: rank count.
        timeout_seconds: maximum wait for a peer.

    Raises:
        OSError: the system does not allow reading other processes' memory.
    """

    def __init__(self, rank: int, size: int, timeout_seconds: float) -> None:
        self.functions, self.timeout_seconds = _functions(), timeout_seconds
        self.failure = ""
        """Reason why the link is unusable; empty while usable."""
        self.error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.sent: deque[Tensor] = deque()
        """Messages not read yet by some rank, oldest first."""
        self.ranks: Sequence[int] = ()
        """Global ranks in the group; their announced failures end a wait. Set by ``open_link``."""
        self._sizes, self._in_progress = _INT * size, list[tuple[int, weakref.ref[Reading]]]()
        # 63 bits: the token travels as a signed 64-bit integer.
        token, descriptor, address = secrets.randbits(63), _INT(), _NUMBER()
        outputs = ctypes.byref(descriptor), ctypes.byref(address)
        self.handle: int | None = self.functions["create"](rank, size, token, *outputs, self.error)
        if self.handle is None:
            raise OSError(self.error.value.decode())
        self.address = Address(os.getpid(), descriptor.value, address.value, token)

    def join(self, addresses: Sequence[Address]) -> None:
        """Open all ranks' boards.

        Raises:
            OSError: the system does not allow reading other processes' memory.
        """
        for rank, address in enumerate(addresses):
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
        """Start an exchange: send ``sent[p]`` elements to rank p, and receive ``received[p]``.

        Args:
            message: elements to send.
            sent: element count per destination rank.
            result: tensor to fill; None: ``Reading.wait`` allocates it.
            received: element count per source rank.
            same: send the message start to every rank, instead of consecutive slices.

        Raises:
            RuntimeError: too many exchanges are in flight, and a peer does not read them in time.
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
            # Only if a peer is many exchanges behind, so polling is good enough.
            time.sleep(1e-3)
        self.sent.append(message)
        while len(self.sent) > num_unread:
            self.sent.popleft()
        if result is None:
            result = message.new_empty(0)
        reading = Reading(self, number.value, result, self._sizes(*received), sum(received))
        if len(self._in_progress) >= _MANY:
            self._skip_dropped()
        self._in_progress.append((number.value, weakref.ref(reading)))
        return reading

    def release_read(self) -> None:
        """Free the messages read by all ranks."""
        num_unread = 0 if self.failure else self.functions["unread"](self.handle)
        while len(self.sent) > num_unread:
            self.sent.popleft()

    def check(self, deadline: float, listener: Listener) -> None:
        """Raise RuntimeError if the deadline has passed, or a peer has failed alone."""
        try:
            listener.check()
        except RuntimeError as error:
            self.failure = str(error)
            raise
        if time.monotonic() > deadline:
            self.failure = f"a peer did not answer within {self.timeout_seconds:g} s"
            raise RuntimeError(self.failure)

    def close(self) -> None:
        """Leave the link, after peers have read the last messages or ``_LEAVING_SECONDS`` have passed."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self.functions["close"](handle, 0.0 if self.failure else _LEAVING_SECONDS)
        self.failure = self.failure or "the link to the other ranks is closed"
        self.sent.clear()

    def forget(self) -> None:
        """Disable the link in a forked child, because it belongs to the parent."""
        self.handle, self.failure = None, "the link to the other ranks belongs to the parent process"

    def _skip_dropped(self) -> None:
        """Tell peers not to wait for exchanges dropped by this rank without a wait."""
        pending = []
        for number, reference in self._in_progress:
            reading = reference()
            if reading is None:
                self.functions["skip"](self.handle, number)
            elif not reading.is_finished:
                pending.append((number, reference))
        self._in_progress = pending


class _LazyLinks(dict["weakref.ref[dist.ProcessGroup]", HostLink | None]):
    """Dict opening a group's link on first access."""

    def __missing__(self, reference: "weakref.ref[dist.ProcessGroup]") -> HostLink | None:
        group = reference()
        assert group is not None
        links[group] = link = open_link(group)
        return link


links: "WeakKeyDictionary[dist.ProcessGroup, HostLink | None]" = WeakKeyDictionary()
"""Link per group; None if the group uses gloo. ``links[group]`` opens the link at the first access, which
is collective; ``links.get(group)`` does not.
"""
links.data = _LazyLinks()  # type: ignore[attr-defined]  # a hit stays in C
_open_links: "weakref.WeakSet[HostLink]" = weakref.WeakSet()


def open_links() -> list[HostLink]:
    """Return all open links in this process."""
    return list(_open_links)


def open_link(group: dist.ProcessGroup) -> HostLink | None:
    """Open a link between the ranks in a group. Returns None if the group must use gloo. Collective.

    Raises:
        RuntimeError: a rank does not answer; the error is the backend's.
    """
    # A subclass, such as a slow group in tests, wants separate collectives.
    link = link_or_reason(group)[0] if is_gloo(group) else None
    if link is not None:
        link.ranks = dist.get_process_group_ranks(group)
        _open_links.add(link)
        # Runs when the group is collected, or at exit.
        multiprocessing.util.Finalize(group, link.close, exitpriority=0)
    return link


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether a group's CPU collectives run in gloo itself, not in a subclass or wrapper."""
    if type(group) is not dist.ProcessGroup:
        return False
    backend: Any = group._get_backend(torch.device("cpu"))
    return bool(backend.name() == "gloo")


def hosts_of_ranks(group: dist.ProcessGroup) -> list[str]:
    """Return a string per rank in a group, equal for ranks on the same host. Collective."""
    (hosts,) = _gather_items(group, (_host(),))
    return list(hosts)


def link_or_reason(group: dist.ProcessGroup) -> tuple[HostLink | None, str]:
    """Open a link between the ranks in a gloo group.

    If any rank cannot, return None and the reason. Collective.
    """
    backend: Any = group._get_backend(torch.device("cpu"))
    link, refusal = None, ""
    try:
        if os.environ.get(_SWITCH) == "0":
            raise _Refused(f"{_SWITCH}=0 switches it off")
        link = HostLink(group.rank(), group.size(), backend.options._timeout.total_seconds())
    except OSError as error:
        refusal = str(error)
    # All ranks must decide alike, so exchange the reasons before anybody joins.
    hosts, addresses, refusals = _gather_items(group, (_host(), link and link.address, refusal))
    is_one_host = len(set(hosts)) == 1
    if link is not None and is_one_host and not any(refusals):
        try:
            link.join(addresses)
        except OSError as error:
            refusal = str(error)
        (refusals,) = _gather_items(group, (refusal,))
        if not any(refusals):
            return link, ""
    if link is not None:
        link.close()
    reason = ", ".join(f"rank {rank}: {why}" for rank, why in enumerate(refusals) if why)
    if group.rank() == 0 and is_one_host:
        _logger.warning(
            "the %d ranks of a process group are on one host but send messages through gloo's sockets, which "
            "is slower than reading each other's memory (%s)",
            group.size(),
            reason,
        )
    return None, reason if is_one_host else "they are on several hosts"


def _gather_items(group: dist.ProcessGroup, mine: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Gather a tuple from every rank. Returns a tuple per item, with a value per rank."""
    items: list[Any] = [None] * group.size()
    dist.all_gather_object(items, mine, group=group)
    return list(zip(*items, strict=True))


def _host() -> str:
    """Return a string shared by all processes on a host; empty outside Linux."""
    if named := os.environ.get(_HOST_NAME):
        return named
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text() if path.exists() else ""


def _functions() -> dict[str, Any]:
    """Return the compiled library's C functions by short name. Raises _Refused if they are missing."""
    library = c_entry_points()
    if library is None:
        raise _Refused("no compiled kernels")
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"meshrec_link_{name}", None)
        if function is None:
            raise _Refused("the compiled kernels have no links: they are for Linux")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


def _forget_links() -> None:
    """Disable all links. Runs in a forked child."""
    for link in _open_links:
        link.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_links)
