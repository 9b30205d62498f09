"""Messages between CPU ranks of one host, without a network: each rank reads them from the others' memory.

Gloo sends them through TCP sockets even there. A link takes the place of its collectives for a process group
whose ranks all run on one Linux host and may read each other's memory; they find that out together at the
group's first collective, and one log line says why where it is not so. Results are the same bits. The
environment variable ``MESHREC_HOST_LINK=0``, on any rank, switches links off.
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
_FAILED, _NOT_YET = -1, -2
_PEER_LOST = "the memory of a peer could not be read"  # of csrc/dist/gather.cpp, as it begins
_LEAVING_SECONDS = 5.0
_ERROR_BYTES = 256
_MANY = 8  # exchanges under way, from which it is looked whether somebody still waits for them
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
    """Why there is no link; a log line tells it, and gloo serves."""


class Address(NamedTuple):
    """Where a rank is found: its process, there the descriptor and the address of its board (see
    csrc/host/host_link.cpp), and what the board says.
    """

    pid: int
    descriptor: int
    address: int
    token: int


@dataclass(eq=False)
class Reading:
    """One exchange on a link; ``wait`` fills ``result``. Dropped without, it holds up nobody for long."""

    link: "HostLink"
    number: int
    result: Tensor
    """Empty before ``wait``, where that makes it: while the message travels, others need the memory."""
    sizes: Any
    """Elements from each rank."""
    num_elements: int
    """All of them."""
    is_done: bool = False

    def wait(self, make: Callable[[Tensor, int, int], Tensor] | None = None) -> None:
        """Blocks until the result is there.

        ``make``: makes it, when all peers have started the exchange. It reads their memory itself, by the
        link and the number of the exchange, which it gets beside the empty result.

        Raises:
            RuntimeError: when a peer has ended, or does not answer within the process group's timeout. Then,
                and only then, the link has a ``failure``; other errors are those of making the result.
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
            # Such as memory that is not there: the peers need not keep their messages for that.
            if not link.failure:
                link.functions["skip"](link.handle, self.number)
            raise
        while len(link.sent) > outcome:
            link.sent.popleft()


class HostLink:
    """The ranks of one process group, which read each other's memory; ``open_link`` gives it.

    All ranks start the same exchanges in the same order, and wait for them in any order. A message must not
    be written to before all have read it; the link keeps it alive so long.

    Raises:
        OSError: where the system does not allow it.
    """

    def __init__(self, rank: int, size: int, timeout_seconds: float) -> None:
        self.functions, self.timeout_seconds = _functions(), timeout_seconds
        self.failure = ""
        """Why it is of no use any more."""
        self.error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.sent: deque[Tensor] = deque()
        """The last messages: those that not all ranks have read."""
        self._sizes, self._under_way = _INT * size, list[tuple[int, weakref.ref[Reading]]]()
        token, descriptor, address = secrets.randbits(63), _INT(), _NUMBER()
        places = ctypes.byref(descriptor), ctypes.byref(address)
        self.handle: int | None = self.functions["create"](rank, size, token, *places, self.error)
        if self.handle is None:
            raise OSError(self.error.value.decode())
        self.address = Address(os.getpid(), descriptor.value, address.value, token)

    def join(self, addresses: Sequence[Address]) -> None:
        """Opens the boards of all ranks.

        Raises:
            OSError: where the system does not allow it.
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
        """Starts to give rank p ``sent[p]`` elements of the message, and to get ``received[p]`` of the
        result, which is made when it is waited for, if there is none.

        ``same``: every rank gets the message from its beginning; else its next elements.

        Raises:
            RuntimeError: when too many exchanges are under way, and a peer reads none of them in time.
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
        """Lets go of the messages that all ranks have read by now."""
        num_unread = 0 if self.failure else self.functions["unread"](self.handle)
        while len(self.sent) > num_unread:
            self.sent.popleft()

    def check(self, deadline: float) -> None:
        """Raises RuntimeError when it is past."""
        if time.monotonic() > deadline:
            self.failure = f"a peer did not answer within {self.timeout_seconds:g} s"
            raise RuntimeError(self.failure)

    def close(self) -> None:
        """Leaves, once the others have read what they wait for."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self.functions["close"](handle, 0.0 if self.failure else _LEAVING_SECONDS)
        self.failure = self.failure or "the link to the other ranks is closed"
        self.sent.clear()

    def forget(self) -> None:
        """In a child process: the link is the parent's."""
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
"""The link that collectives over a group use; None: gloo has to do. ``links[group]`` opens it when it is
looked up for the first time, which is collective; ``links.get(group)`` does not.
"""
links.data = _OpenedWhenMissed()  # type: ignore[attr-defined]  # no call of ours where there is one
_open_links: "weakref.WeakSet[HostLink]" = weakref.WeakSet()


def open_links() -> list[HostLink]:
    """The links of this process."""
    return list(_open_links)


def open_link(group: dist.ProcessGroup) -> HostLink | None:
    """A new link between the ranks of a group; None where gloo has to do. Collective.

    Raises:
        RuntimeError: of the backend, where a rank does not answer.
    """
    if type(group) is not dist.ProcessGroup:  # such as a slow one for tests: its own collectives are meant
        return None
    backend: Any = group._get_backend(torch.device("cpu"))
    link = _joined(group, backend) if backend.name() == "gloo" else None
    if link is not None:
        _open_links.add(link)
        # At the end of the group, or of the process.
        multiprocessing.util.Finalize(group, link.close, exitpriority=0)
    return link


def _joined(group: dist.ProcessGroup, backend: Any) -> HostLink | None:
    """The link, on all ranks or on none."""
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
            return link
    if link is not None:
        link.close()
    if group.rank() == 0 and is_one_host:
        _logger.warning(
            "the %d ranks of a process group are on one host but send messages through gloo's sockets, which "
            "is slower than reading each other's memory (%s)",
            group.size(),
            ", ".join(f"rank {rank}: {why}" for rank, why in enumerate(refusals) if why),
        )
    return None


def _gathered(group: dist.ProcessGroup, mine: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """What all ranks have, item by item."""
    items: list[Any] = [None] * group.size()
    dist.all_gather_object(items, mine, group=group)
    return list(zip(*items, strict=True))


def _host() -> str:
    """The same for all processes of one host; empty where there is no Linux."""
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
