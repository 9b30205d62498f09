"""Messages between CPU ranks of one host, without a network: each rank reads them from the others' memory.

Gloo sends messages through TCP sockets even on one host. A link replaces its collectives for a process group
whose ranks all run on one Linux host and may read each other's memory. The ranks find that out together at
the group's first collective; if there can be no link, one log line says why. Results are the same bits. The
environment variable ``MESHREC_HOST_LINK=0``, on any rank, switches links off. ``MESHREC_HOST=NAME`` gives a
rank's host a name: ranks with other names count as on other hosts, for trials of several nodes on one
machine.

[Note: why ranks may read each other's memory]

A rank reads with ``process_vm_readv``, which the system allows for processes of one user (with Yama, after
the ``prctl`` in csrc/host/host_link.cpp). It only reads: no rank writes to another's memory. The reads are
safe because

1. all ranks start the same exchanges in the same order, and number them. A rank publishes the addresses of a
   message on its board before it raises the number of started exchanges, so no reader sees half an entry;
2. nobody writes to a message, or frees it, before all ranks have read it. ``HostLink.sent`` keeps it alive
   until the boards say so. Therefore collectives get tensors of their own, never the caller's;
3. a board carries a random token. A process that has the number of a dead peer does not have its token;
4. a peer that dies makes the read fail, and one that hangs meets the timeout of the process group. Both raise
   on the reader; the other ranks learn of it as in [Note: how errors reach every rank]
   (checkpoint/agreement.py);
5. a forked child forgets the link, because it belongs to the parent. At its end, a rank waits some seconds
   until the others have read its last messages.
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

from meshrec.ops.library import c_entry_points

_logger = logging.getLogger("meshrec")
_SWITCH = "MESHREC_HOST_LINK"
_HOST_NAME = "MESHREC_HOST"
_FAILED, _NOT_YET = -1, -2
_PEER_LOST = "the memory of a peer could not be read"  # the first words of csrc/host/host_link.h: kPeerLost
_LEAVING_SECONDS = 5.0
_ERROR_BYTES = 256
_MANY = 8  # exchanges in flight, above which `start` looks for those that nobody waits for any more
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
    """The reason why there is not a link. A log line names it, and gloo is used instead."""


class Address(NamedTuple):
    """The place of a rank's board (see csrc/host/host_link.cpp): its process, and there the descriptor and
    the address of the board; ``token`` is what the board must say.
    """

    pid: int
    descriptor: int
    address: int
    token: int


@dataclass(eq=False)
class Reading:
    """One exchange on a link; ``wait`` fills ``result``. One that is dropped delays no rank for long."""

    link: "HostLink"
    number: int
    result: Tensor
    """The result; empty before ``wait`` if that allocates it, since others need the memory meanwhile."""
    sizes: Any
    """The number of elements from each rank."""
    num_elements: int
    """The number of elements from all ranks."""
    is_done: bool = False

    def wait(self, make: Callable[[Tensor, int, int], Tensor] | None = None) -> None:
        """Wait until the result has arrived.

        Args:
            make: makes the result once all peers have started the exchange. It reads their memory itself: it
                gets the empty result, the link, and the number of the exchange.

        Raises:
            RuntimeError: a peer has ended, or does not answer within the process group's timeout. Only then
                does the link have a ``failure``; other errors are those of making the result.
        """
        link, deadline, name = self.link, 0.0, "arrive"
        self.is_done = True
        if link.failure:
            raise RuntimeError(link.failure)
        arguments: tuple[Any, ...] = self.sizes, self.result.element_size(), link.error
        try:
            if make is None:
                if self.result.numel() != self.num_elements:
                    self.result = torch.ops.meshrec.new_buffer.default(self.result, self.num_elements)
                name, arguments = "wait", (self.result.data_ptr(), *arguments)
            while (outcome := link.functions[name](link.handle, self.number, *arguments)) == _NOT_YET:
                deadline = deadline or time.monotonic() + link.timeout_seconds
                link.check(deadline)
            if outcome == _FAILED:
                link.failure = link.error.value.decode()
                raise RuntimeError(link.failure)
            if make is not None:
                self.result = make(self.result, link.handle or 0, self.number)
                outcome = link.functions["skip"](link.handle, self.number)
        except BaseException as error:
            if _PEER_LOST in str(error):
                link.failure = _PEER_LOST
            # This rank alone failed, as for lack of memory: the peers need not keep their messages for it.
            if not link.failure:
                link.functions["skip"](link.handle, self.number)
            raise
        while len(link.sent) > outcome:
            link.sent.popleft()


class HostLink:
    """The ranks of one process group, which read each other's memory; ``open_link`` makes it.

    All ranks start the same exchanges in the same order, and wait for them in any order. A message must not
    be written to before all ranks have read it; the link keeps it alive until then.

    Raises:
        OSError: the system does not allow it.
    """

    def __init__(self, rank: int, size: int, timeout_seconds: float) -> None:
        self.functions, self.timeout_seconds = _functions(), timeout_seconds
        self.failure = ""
        """The reason for which the link cannot be used any more; empty while it can."""
        self.error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.sent: deque[Tensor] = deque()
        """The messages that some rank has not read yet."""
        self._sizes, self._under_way = _INT * size, list[tuple[int, weakref.ref[Reading]]]()
        token, descriptor, address = secrets.randbits(63), _INT(), _NUMBER()
        places = ctypes.byref(descriptor), ctypes.byref(address)
        self.handle: int | None = self.functions["create"](rank, size, token, *places, self.error)
        if self.handle is None:
            raise OSError(self.error.value.decode())
        self.address = Address(os.getpid(), descriptor.value, address.value, token)

    def join(self, addresses: Sequence[Address]) -> None:
        """Open the boards of all ranks.

        Raises:
            OSError: the system does not allow it.
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
        """Start an exchange: send ``sent[p]`` elements to rank p, and receive ``received[p]`` from it.

        Args:
            message: the elements to send.
            sent: the number of elements for each rank.
            result: the tensor to fill; None has ``Reading.wait`` allocate it.
            received: the number of elements from each rank.
            same: give every rank the message from its beginning, instead of consecutive pieces of it.

        Raises:
            RuntimeError: too many exchanges are in flight, and a peer reads none of them in time.
        """
        if self.failure:
            raise RuntimeError(self.failure)
        message, number, deadline = message.contiguous(), _INT(), 0.0
        arguments = message.data_ptr(), self._sizes(*sent), message.element_size(), same, ctypes.byref(number)
        while (num_unread := self.functions["start"](self.handle, *arguments)) == _NOT_YET:
            deadline = deadline or time.monotonic() + self.timeout_seconds
            self.check(deadline)
            time.sleep(1e-3)
        self.sent.append(message)
        while len(self.sent) > num_unread:
            self.sent.popleft()
        if result is None:
            result = message.new_empty(0)
        reading = Reading(self, number.value, result, self._sizes(*received), sum(received))
        if len(self._under_way) >= _MANY:
            self._skip_dropped()
        self._under_way.append((number.value, weakref.ref(reading)))
        return reading

    def release_read(self) -> None:
        """Release the messages that all ranks have read by now."""
        num_unread = 0 if self.failure else self.functions["unread"](self.handle)
        while len(self.sent) > num_unread:
            self.sent.popleft()

    def check(self, deadline: float) -> None:
        """Raise RuntimeError if the deadline is past."""
        if time.monotonic() > deadline:
            self.failure = f"a peer did not answer within {self.timeout_seconds:g} s"
            raise RuntimeError(self.failure)

    def close(self) -> None:
        """Leave the link, once the others have read what they wait for."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self.functions["close"](handle, 0.0 if self.failure else _LEAVING_SECONDS)
        self.failure = self.failure or "the link to the other ranks is closed"
        self.sent.clear()

    def forget(self) -> None:
        """Give up the link in a forked child: it belongs to the parent."""
        self.handle, self.failure = None, "the link to the other ranks belongs to the parent process"

    def _skip_dropped(self) -> None:
        kept = []
        for number, reference in self._under_way:
            reading = reference()
            if reading is None:
                self.functions["skip"](self.handle, number)
            elif not reading.is_done:
                kept.append((number, reference))
        self._under_way = kept


class _OpenedWhenMissed(dict["weakref.ref[dist.ProcessGroup]", HostLink | None]):
    def __missing__(self, reference: "weakref.ref[dist.ProcessGroup]") -> HostLink | None:
        group = reference()
        assert group is not None
        links[group] = link = open_link(group)
        return link


links: "WeakKeyDictionary[dist.ProcessGroup, HostLink | None]" = WeakKeyDictionary()
"""The link that collectives over a group use, by group; None if gloo serves the group. ``links[group]`` opens
the link at the first look-up, which is collective; ``links.get(group)`` does not open it.
"""
links.data = _OpenedWhenMissed()  # type: ignore[attr-defined]  # no call of ours where there is one
_open_links: "weakref.WeakSet[HostLink]" = weakref.WeakSet()


def open_links() -> list[HostLink]:
    """Return the open links of this process."""
    return list(_open_links)


def open_link(group: dist.ProcessGroup) -> HostLink | None:
    """Open a new link between the ranks of a group; None if gloo has to serve it. Collective.

    Raises:
        RuntimeError: a rank does not answer. The error is the backend's.
    """
    if type(group) is not dist.ProcessGroup:  # such as a slow one for tests: its own collectives are meant
        return None
    backend: Any = group._get_backend(torch.device("cpu"))
    link = link_or_reason(group)[0] if backend.name() == "gloo" else None
    if link is not None:
        _open_links.add(link)
        # At the end of the group, or of the process.
        multiprocessing.util.Finalize(group, link.close, exitpriority=0)
    return link


def link_or_reason(group: dist.ProcessGroup) -> tuple[HostLink | None, str]:
    """Join the ranks of a gloo group by a link, on all of them or on none; else return why not.
    Collective.
    """
    backend: Any = group._get_backend(torch.device("cpu"))
    link, refusal = None, ""
    try:
        if os.environ.get(_SWITCH) == "0":
            raise _Refused(f"{_SWITCH}=0 switches it off")
        link = HostLink(group.rank(), group.size(), backend.options._timeout.total_seconds())
    except OSError as error:
        refusal = str(error)
    hosts, addresses, refusals = _gathered(group, (_host(), link and link.address, refusal))
    is_one_host = len(set(hosts)) == 1
    if link is not None and is_one_host and not any(refusals):
        try:
            link.join(addresses)
        except OSError as error:
            refusal = str(error)
        (refusals,) = _gathered(group, (refusal,))
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


def _gathered(group: dist.ProcessGroup, mine: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Gather what all ranks have, item by item."""
    items: list[Any] = [None] * group.size()
    dist.all_gather_object(items, mine, group=group)
    return list(zip(*items, strict=True))


def _host() -> str:
    """Return a text that all processes of one host share; empty on systems other than Linux."""
    if named := os.environ.get(_HOST_NAME):
        return named
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text() if path.exists() else ""


def _functions() -> dict[str, Any]:
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
    for link in _open_links:
        link.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_links)
