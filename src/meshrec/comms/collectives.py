"""The collectives of sharded modules. They start here, and are awaited where the value is needed.

The error of a failed collective names it, this rank, and the ranks that do not answer. The ranks find these
through the store of the process group, because a broken connection tells an address, not a rank.

[Note: what may run on which thread]

Ranks match collectives by their order, so all collectives of a process group start on one thread at a time,
in the same order on all ranks. The threads of a rank are

1. the main thread: it runs steps, checkpoints and evaluations, and starts all collectives of the forward
   pass. Signal handlers only set a flag, which the main thread reads after a step (train/stopping.py);
2. autograd's threads: on a GPU they run the backward pass, and start its collectives, while the main thread
   waits for them. Two backward passes of one module must not run at the same time; the tables' locks
   (tables/locking.py, tables/writes.py) protect only updates of unsharded tables;
3. the kernels' threads: they split the rows of one call, and end with it;
4. the prefetch thread (data/prefetch.py): it runs the reader of the data, and nothing else. It starts no
   collective;
5. the "checkpoint" thread of the first rank: it waits for files and writes the manifest. A forked child of
   each rank writes the data (checkpoint/snapshot.py); it must not use threads, devices or sockets;
6. the workers and carriers of stages in one process (pipeline/stages/threads.py): each runs only its own
   stage;
7. the two threads of a table in a file (tables/file_table.py): one reads rows to memory, one writes rows that
   had to leave it. They start no collective, and no work on torch's threads.

The launcher has a thread that kills ranks which keep others waiting (train/launch.py). A server answers on
the thread of its event loop, reads packed requests on another one, and computes on one thread per model
(serve/batching.py); nothing else may call a predictor.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.comms.host_link import Reading, links
from meshrec.comms.joining import store_host
from meshrec.comms.mesh import Axis
from meshrec.comms.phase_clock import recorders
from meshrec.comms.waiting import blocked, blocked_time

_ANSWER_SECONDS = 3.0
_GLOO = "gloo/transport"
"""A part of the source file that gloo names in each error of a connection."""
# The older name warns where the newer one exists.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_traffic: list[Counter[str]] = []
_logger = logging.getLogger("meshrec")
_told: set[str] = set()


class CollectiveError(RuntimeError):
    """A collective did not finish: a peer died, hung, or left."""


@dataclass
class InFlight:
    """A collective in flight; ``wait`` returns the tensor that it fills."""

    tensor: Tensor | None
    """The tensor to fill; None if ``wait`` allocates it."""
    work: Any
    name: str
    group: dist.ProcessGroup | None

    def wait(self) -> Tensor:
        """Wait (on CUDA: on the current stream) until the tensor is filled. Raises CollectiveError."""
        if self.work is not None:
            work, self.work = self.work, None
            began = time.perf_counter()
            try:
                work.wait()
            except RuntimeError as error:
                if not _has_failed(work):
                    raise
                raise _explained(error, self.name, self.group) from error
            finally:
                blocked_time.seconds += time.perf_counter() - began
            if self.tensor is None:
                self.tensor = work.result
        assert self.tensor is not None
        return self.tensor

    def use(self, make: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        """Wait, and return ``make(tensor, 0, 0)``.

        If ranks read each other's memory, ``make`` reads the messages where they are, see ``Reading.wait``.
        The tensor is then never assembled. Raises CollectiveError, and what ``make`` raises.
        """
        if self.tensor is not None:
            return make(self.wait(), 0, 0)
        work, self.work = self.work, None
        began = time.perf_counter()
        try:
            work.wait(make)
        except RuntimeError as error:
            if not _has_failed(work):
                raise
            raise _explained(error, self.name, self.group) from error
        finally:
            blocked_time.seconds += time.perf_counter() - began
        return cast(Tensor, work.result)


class _CopyBack:
    """A collective of CPU copies; its wait copies what arrived to the tensor on the device."""

    def __init__(self, work: Any, arrived: Tensor, target: Tensor) -> None:
        self._work, self._arrived, self._target = work, arrived, target

    def wait(self) -> None:
        self._work.wait()
        self._target.copy_(self._arrived)


class Splits(NamedTuple):
    """Elements for (or from) each rank of an axis."""

    sent: list[int]
    received: list[int]


def all_to_all(sent: Tensor, splits: Splits, axis: Axis, name: str, *, same: bool = False) -> InFlight:
    """Starts sending consecutive pieces of a 1-D tensor to the ranks of an axis; ``same``: all of it to each.

    ``sent`` must not be written to any more, also after the wait: ranks of one host read it where it is.
    """
    group = axis.group
    if group is None or axis.size == 1:
        return InFlight(sent, None, name, None)
    if _traffic:
        _count(name, sent, splits.sent, axis.rank)
    try:
        link = links[group] if sent.is_cpu else None
    except RuntimeError as error:
        raise _explained(error, name, group) from error
    # Memory that is not there tells of itself: that is no failure of the collective.
    received, sent = None, sent.contiguous()
    if link is None:
        sent = sent.repeat(axis.size) if same else sent
        received = torch.ops.meshrec.new_buffer.default(sent, sum(splits.received))
    work: Any
    try:
        if link is not None:
            work = link.start(sent, splits.sent, None, splits.received, same=same)
        else:
            assert received is not None

            def start(into: Tensor, out_of: Tensor) -> Any:
                return dist.all_to_all_single(
                    into, out_of, splits.received, splits.sent, group=group, async_op=True
                )

            work = _started(start, received, sent, group)
    except RuntimeError as error:
        raise _explained(error, name, group) from error
    started = InFlight(received, work, name, group)
    if recorders and not recorders[0].overlap:
        started.wait()
    return started


def release_read(axis: Axis) -> None:
    """Release the messages on this axis that all ranks have read. Otherwise the next message does so."""
    link = links.get(axis.group) if axis.group is not None else None
    if link is not None:
        link.release_read()


def all_gather(sent: Tensor, axis: Axis, name: str) -> InFlight:
    """Starts gathering tensors of one shape: ``[axis size, *shape]``. ``sent`` as for ``all_to_all``."""
    group = axis.group
    if group is None or axis.size == 1:
        return InFlight(sent[None], None, name, None)
    if _traffic:
        _count(name, sent, [sent.numel()] * axis.size, axis.rank)
    sent = sent.contiguous()
    received = torch.ops.meshrec.new_buffer.default(sent, axis.size * sent.numel())
    work: Any
    try:
        if sent.is_cpu and (link := links[group]) is not None:
            sizes = [sent.numel()] * axis.size
            work = link.start(sent, sizes, received, sizes, same=True)
        else:

            def start(into: Tensor, out_of: Tensor) -> Any:
                return _all_gather(into, out_of, group=group, async_op=True)

            work = _started(start, received, sent.view(-1), group)
    except RuntimeError as error:
        raise _explained(error, name, group) from error
    started = InFlight(received.view(axis.size, *sent.shape), work, name, group)
    if recorders and not recorders[0].overlap:
        started.wait()
    return started


def all_reduce(tensor: Tensor, axis: Axis, name: str) -> None:
    """Sum a tensor over an axis, in place."""
    if axis.group is None or axis.size == 1:
        return
    if _traffic:
        share = 2 * tensor.numel() // axis.size
        _count(name, tensor, [share] * axis.size, axis.rank)
    try:
        if goes_through_cpu(tensor, axis.group):
            copied = tensor.cpu()
            with blocked():
                dist.all_reduce(copied, group=axis.group)
            tensor.copy_(copied)
        else:
            with blocked():
                dist.all_reduce(tensor, group=axis.group)
    except RuntimeError as error:
        raise _explained(error, name, axis.group) from error


def broadcast(tensor: Tensor, axis: Axis, name: str, *, source: int = 0) -> None:
    """Copy what rank ``source`` of an axis has to all ranks of the axis, in place."""
    if axis.group is None or axis.size == 1:
        return
    try:
        copied = tensor.cpu() if goes_through_cpu(tensor, axis.group) else tensor
        dist.broadcast(copied, dist.get_global_rank(axis.group, source), group=axis.group)
        if copied is not tensor:
            tensor.copy_(copied)
    except RuntimeError as error:
        raise _explained(error, name, axis.group) from error


def gather_objects(item: object, axis: Axis, name: str) -> list[Any]:
    """Return what every rank of an axis has; for start-up and failures only."""
    if axis.group is None or axis.size == 1:
        return [item]
    items: list[Any] = [None] * axis.size
    try:
        dist.all_gather_object(items, item, group=axis.group)
    except RuntimeError as error:
        raise _explained(error, name, axis.group) from error
    return items


@contextmanager
def measure_traffic() -> Iterator[Counter[str]]:
    """Count the bytes that this rank sends to others, by the name of the collective."""
    counter: Counter[str] = Counter()
    _traffic.append(counter)
    try:
        yield counter
    finally:
        _traffic.remove(counter)


def goes_through_cpu(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether a collective of this group takes a CPU copy of the tensor: gloo moves CUDA tensors that
    way itself, but not in every collective."""
    if tensor.is_cpu or "nccl" in dist.get_backend(group):
        return False
    if tensor.device.type not in _told:
        _told.add(tensor.device.type)
        _logger.warning(
            "the process group works on the CPU and tables are on %s: every exchange copies through the "
            "CPU. A group of the backend nccl would not.",
            tensor.device.type,
        )
    return True


def _started(
    start: Callable[[Tensor, Tensor], Any], received: Tensor, sent: Tensor, group: dist.ProcessGroup
) -> Any:
    """Start a collective that fills ``received``, through CPU copies where the group needs them."""
    if not goes_through_cpu(sent, group):
        return start(received, sent)
    arrived = torch.empty_like(received, device="cpu")
    return _CopyBack(start(arrived, sent.cpu()), arrived, received)


def named_failure(error: RuntimeError) -> RuntimeError:
    """Return a CollectiveError for an error of gloo or NCCL that names no rank; any other error as it is.

    Collectives that torch starts by itself, or over small values, do not go through this module.
    """
    is_named = isinstance(error, CollectiveError)
    if is_named or not (isinstance(error, dist.DistError) or _GLOO in str(error)):
        return error
    found = _explained(error, "of all ranks", dist.group.WORLD)
    found.__cause__ = error
    return found


def _count(name: str, tensor: Tensor, elements: list[int], own: int) -> None:
    for counter in _traffic:
        counter[name] += (sum(elements) - elements[own]) * tensor.element_size()


def _has_failed(work: Any) -> bool:
    """Return whether an error is the collective's, not that of making the result."""
    return not isinstance(work, Reading) or bool(work.link.failure)


def _explained(error: RuntimeError, name: str, group: dist.ProcessGroup | None) -> CollectiveError:
    """Return an error that names the collective and the peers that do not answer."""
    ranks = dist.get_process_group_ranks(group)
    return CollectiveError(
        f"rank {dist.get_rank()}: the collective '{name}' over ranks {ranks} failed: {_silent_peers(ranks)}. "
        "See the log of that rank for the first error; restart all ranks from the last checkpoint. The "
        f"backend says: {str(error).splitlines()[0]}"
    )


def _silent_peers(ranks: list[int]) -> str:
    """Say which ranks are silent. A live peer soon reports that this collective has failed there, too.

    The store may be hosted by the rank that is stopped, and torch's calls to it have no deadline. So a thread
    asks, which is left behind if there is no answer.
    """
    store, host = dist.distributed_c10d._get_default_store(), store_host()
    me, silent = dist.get_rank(), [rank for rank in ranks if rank != dist.get_rank()]
    heard = threading.Event()
    failures: list[str] = []
    deadline = time.monotonic() + _ANSWER_SECONDS

    def ask() -> None:
        try:
            store.set(f"meshrec/failed/{me}", "1")
            heard.set()
            while silent and time.monotonic() < deadline:
                for rank in list(silent):
                    if store.check([f"meshrec/failed/{rank}"]):
                        silent.remove(rank)
                time.sleep(0.05)
        except RuntimeError as error:
            failures.append(str(error).splitlines()[0])

    thread = threading.Thread(target=ask, name="silent peers", daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS + 1.0)
    if heard.is_set() and not failures and not thread.is_alive():
        return f"no answer from rank {', '.join(map(str, silent))}" if silent else "all peers still answer"
    # The store does not answer, or no longer: it was hosted by whoever is gone.
    if host == "rank 0" and me != 0:
        return "no answer from rank 0"
    return f"the ranks' store cannot be asked who answers (it is with {host or 'a file'})"
