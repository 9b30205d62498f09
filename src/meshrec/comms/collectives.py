"""Collectives for sharded modules. A call starts a collective, and the caller waits where it needs the
result.

If a collective fails, the error names the collective, this rank, and the ranks that do not respond. These
ranks are found through the process group's store, because a broken connection only reveals an address.

[Note: what may run on which thread]

Ranks match collectives by their order. Therefore only a single thread at a time may start collectives in a
process group, and all ranks must start them in the same order. A rank has these threads:

1. the main thread: runs steps, checkpoints and evaluations, and starts all forward pass collectives.
Signal handlers only set a flag, which the main thread reads after a step (train/stopping.py);
2. autograd's threads: on a GPU they run the backward pass including the collectives, while the main thread
waits. Two backward passes through the same module must not overlap; table locks (tables/fused.py,
tables/updates.py) protect only unsharded table updates;
3. kernel threads: split a call's rows, and finish with the call;
4. the prefetch thread (data/prefetch.py): runs the data reader, and starts no collective;
5. the first rank's "checkpoint" thread: waits for files and writes the manifest. A forked child on every
rank writes the data (checkpoint/snapshot.py); it must not use threads, devices or sockets;
6. workers and carriers for stages in a process (stages/threads.py): a worker runs a single stage;
7. two threads per file-backed table (tables/cached/transfers.py): a reader, and a writer for evicted rows.
They start no collectives, and no work on torch's threads;
8. the "dense gradients" thread for a model on several hosts (comms/peer_average.py): waits for point-to-point
dense gradient messages, adds them, and sends the means under separate tags.

The launcher has a thread to kill ranks blocking peers (train/launch.py). A server answers on the event loop
thread, reads packed requests on another thread, and computes on a thread per model (serve/batching.py);
nothing else may call a predictor.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.comms.failures import (
    POLL_SECONDS,
    CollectiveError,
    FailureState,
    Listener,
    check_group,
    count_start,
    lone_failure,
)
from meshrec.comms.host_link import Reading, links, open_links
from meshrec.comms.joining import store_host
from meshrec.comms.mesh import Axis
from meshrec.comms.phase_clock import recorders
from meshrec.ops import operators

# A live peer in the same collective fails, too, and reports it within this time.
_ANSWER_SECONDS = 3.0
_GLOO = "gloo/transport"
"""Part of a source path which all connection errors from gloo contain."""
# all_gather_into_tensor is deprecated in torch versions with all_gather_single.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_traffic: list[Counter[str]] = []  # active counters for measure_traffic
_logger = logging.getLogger("meshrec")
# Timeouts that `set_timeout` has changed, by group.
_timeouts: "WeakKeyDictionary[dist.ProcessGroup, timedelta]" = WeakKeyDictionary()
_warned_devices: set[str] = set()  # device types for which the CPU detour has been logged


class BlockedTime:
    """Total seconds for which this process has waited in collectives. Used to find the slowest rank.

    The slowest rank waits least. On a GPU, collectives block the device and not the process, so they do not
    count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0


blocked_time = BlockedTime()
"""The only instance: a rank is a process. Waits in the forward pass add to it directly, because ``blocked``
costs two Python calls.
"""


@contextmanager
def blocked() -> Iterator[None]:
    """Context: count the time inside as waiting in a collective."""
    start = time.perf_counter()
    try:
        yield
    finally:
        blocked_time.seconds += time.perf_counter() - start


@dataclass
class InFlight:
    """A collective which has started. Call ``wait`` once to get the result; later calls return it again."""

    tensor: Tensor | None
    """Tensor for the result, which is valid after ``wait``. None if ``wait`` allocates it."""
    work: Any  # object with wait(), such as dist.Work or Reading; None once awaited
    name: str
    """Name of the collective in errors."""
    group: dist.ProcessGroup | None
    """Ranks in the collective; None for a single process."""

    def wait(self) -> Tensor:
        """Wait until the collective is complete, and return the result.

        On CUDA, the current stream waits instead of this thread.

        Raises:
            CollectiveError: a peer failed.
        """
        if self.work is not None:
            # Waiting again must return the same tensor, not wait for the work twice.
            work, self.work = self.work, None
            began = time.perf_counter()
            try:
                work.wait()
            except RuntimeError as error:
                if not _has_failed(work):
                    raise
                raise _collective_error(error, self.name, self.group) from error
            finally:
                blocked_time.seconds += time.perf_counter() - began
            if self.tensor is None:
                self.tensor = work.result
        assert self.tensor is not None
        return self.tensor

    def wait_and_compute(self, reader: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        """Wait until the collective is complete, and return a tensor which ``reader`` computes from the
        messages.

        Without a host link, calls ``reader(messages, 0, 0)`` with the received messages. On a host link,
        messages are not copied to this rank. ``reader`` then gets an empty tensor, the link handle and the
        exchange number, and reads the messages from the memory of the peers; see ``Reading.wait``.

        Args:
            reader: function from (received messages, link handle, exchange number) to the result.

        Raises:
            CollectiveError: a peer failed.
        """
        # gloo and NCCL fill a tensor. Only a host link leaves messages in peer memory.
        if self.tensor is not None:
            return reader(self.wait(), 0, 0)
        work, self.work = self.work, None
        began = time.perf_counter()
        try:
            work.wait(reader)
        except RuntimeError as error:
            if not _has_failed(work):
                raise
            raise _collective_error(error, self.name, self.group) from error
        finally:
            blocked_time.seconds += time.perf_counter() - began
        return cast(Tensor, work.result)


class _CopyBack:
    """A collective on CPU copies of device tensors. ``wait`` copies the result back to the device."""

    def __init__(self, work: Any, arrived: Tensor, target: Tensor) -> None:
        self._work, self._arrived, self._target = work, arrived, target

    def wait(self) -> None:
        self._work.wait()
        self._target.copy_(self._arrived)


class _PolledWork:
    """A gloo collective whose ``wait`` also raises if another rank fails before it reaches the collective.

    See [Note: a rank that fails alone] in ``failures.py``.
    """

    def __init__(self, work: Any, group: dist.ProcessGroup) -> None:
        # ``work`` is torch's handle of the running collective.
        self._work, self._group = work, group

    def wait(self) -> None:
        listener: Listener | None = None
        while True:
            try:
                # Waits only briefly, to look for announced errors in between.
                self._work.wait(timedelta(seconds=POLL_SECONDS))
                return
            except RuntimeError:
                if self._work.is_completed():
                    self._work.wait()  # raises unless the collective has succeeded
                    return
            # Created at the first timeout only, because most collectives end earlier.
            listener = listener or Listener(dist.get_process_group_ranks(self._group))
            listener.check()


class Splits(NamedTuple):
    """Message sizes in an all-to-all, in elements."""

    sent: list[int]
    """Elements sent to each rank on the axis."""
    received: list[int]
    """Elements received from each rank on the axis."""


def all_to_all(sent: Tensor, splits: Splits, axis: Axis, name: str, *, same: bool = False) -> InFlight:
    """Start an all-to-all: send consecutive slices of a 1-D tensor to the ranks on an axis.

    Args:
        sent: elements to send. They must not be modified, not even after the wait, because ranks on the same
            host read them in place.
        splits: elements sent to and received from each rank.
        axis: ranks in the collective.
        name: name of the collective, for errors and ``measure_traffic``.
        same: send the whole tensor to every rank, instead of slices.

    Returns:
        The running collective. The result has the messages from all ranks, in rank order, 1-D.

    Raises:
        CollectiveError: a peer failed.
    """
    group = axis.group
    if group is None or axis.size == 1:
        # A single rank: the message to itself is the result.
        return InFlight(sent, None, name, None)
    # Inlined from `count_start`, because this function runs several times per step.
    if FailureState.has_failed:
        check_group(group)
    FailureState.num_started += 1
    if _traffic:
        _count_bytes(name, sent, splits.sent, axis.rank)
    try:
        # Opening a link at the first use is collective.
        link = links[group] if sent.is_cpu else None
    except RuntimeError as error:
        raise _collective_error(error, name, group) from error
    # Outside the try block: running out of memory here is not a collective failure.
    received, sent = None, sent.contiguous()
    if link is None:
        # The backend has no all-to-all sending a buffer to every rank.
        sent = sent.repeat(axis.size) if same else sent
        received = operators.new_buffer(sent, sum(splits.received))
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

            work = _start_collective(start, received, sent, group)
    except RuntimeError as error:
        raise _collective_error(error, name, group) from error
    # Without overlap, a phase recorder attributes the whole exchange to the starting phase.
    started = InFlight(received, work, name, group)
    if recorders and not recorders[0].overlap:
        started.wait()
    return started


def release_read(axis: Axis) -> None:
    """Free the messages which this rank has sent on a host link and which all ranks on this axis have read.

    Without this call, a later exchange on the link frees them. If the axis has no host link, do nothing.
    """
    # ``get``, because ``links[group]`` would open a link, which is collective.
    link = links.get(axis.group) if axis.group is not None else None
    if link is not None:
        link.release_read()


def all_gather(sent: Tensor, axis: Axis, name: str) -> InFlight:
    """Start an all-gather of tensors with equal shapes.

    Args:
        sent: this rank's tensor. It must not be modified, as for ``all_to_all``.
        axis: ranks in the collective.
        name: name of the collective, for errors and ``measure_traffic``.

    Returns:
        The running collective. The result has the tensors from all ranks, ``[axis size, *shape]``.

    Raises:
        CollectiveError: a peer failed.
    """
    group = axis.group
    if group is None or axis.size == 1:
        return InFlight(sent[None], None, name, None)
    if FailureState.has_failed:
        check_group(group)
    FailureState.num_started += 1
    if _traffic:
        _count_bytes(name, sent, [sent.numel()] * axis.size, axis.rank)
    sent = sent.contiguous()
    # Memory kept from earlier steps, without page faults.
    received = operators.new_buffer(sent, axis.size * sent.numel())
    work: Any
    try:
        if sent.is_cpu and (link := links[group]) is not None:
            sizes = [sent.numel()] * axis.size
            work = link.start(sent, sizes, received, sizes, same=True)
        else:

            def start(into: Tensor, out_of: Tensor) -> Any:
                return _all_gather(into, out_of, group=group, async_op=True)

            work = _start_collective(start, received, sent.view(-1), group)
    except RuntimeError as error:
        raise _collective_error(error, name, group) from error
    # A view, so the collective fills the result in place.
    started = InFlight(received.view(axis.size, *sent.shape), work, name, group)
    if recorders and not recorders[0].overlap:
        started.wait()
    return started


def all_reduce(tensor: Tensor, axis: Axis, name: str) -> None:
    """Replace a tensor by the sum of the tensors from all ranks on an axis. Waits for the result.

    Args:
        tensor: this rank's addend, overwritten by the sum.
        axis: ranks in the collective.
        name: name of the collective, for errors and ``measure_traffic``.

    Raises:
        CollectiveError: a peer failed.
    """
    if _traffic and axis.group is not None and axis.size > 1:
        # A ring all-reduce sends every element twice, in shares of 1 / size.
        # _count_bytes leaves out the rank's own share, which gives 2 * numel * (size - 1) / size.
        share = 2 * tensor.numel() // axis.size
        _count_bytes(name, tensor, [share] * axis.size, axis.rank)
    _run_on_tensor(lambda part: dist.all_reduce(part, group=axis.group, async_op=True), tensor, axis, name)


def broadcast(tensor: Tensor, axis: Axis, name: str, *, source: int = 0) -> None:
    """Replace a tensor on all ranks of an axis by the tensor from rank ``source``. Waits for the result.

    Args:
        tensor: value on the source rank; overwritten on other ranks.
        axis: ranks in the collective.
        name: name of the collective, for errors.
        source: position of the source rank on the axis.

    Raises:
        CollectiveError: a peer failed.
    """

    def start(copied: Tensor) -> Any:
        assert axis.group is not None
        # torch names the source by global rank.
        first = dist.get_global_rank(axis.group, source)
        return dist.broadcast(copied, first, group=axis.group, async_op=True)

    _run_on_tensor(start, tensor, axis, name)


def gather_objects(item: object, axis: Axis, name: str) -> list[Any]:
    """Return the objects passed by all ranks on an axis, in rank order. Collective.

    Objects are pickled, which is slow. Use it only at start-up and after failures.

    Args:
        item: this rank's object.
        axis: ranks in the collective.
        name: name of the collective, for errors.

    Raises:
        CollectiveError: a peer failed.
    """
    if axis.group is None or axis.size == 1:
        return [item]
    count_start(axis.group)
    items: list[Any] = [None] * axis.size
    try:
        dist.all_gather_object(items, item, group=axis.group)
    except RuntimeError as error:
        raise _collective_error(error, name, axis.group) from error
    return items


@contextmanager
def measure_traffic() -> Iterator[Counter[str]]:
    """Context: count the bytes this rank sends to other ranks. Yields a counter by collective name."""
    counter: Counter[str] = Counter()
    _traffic.append(counter)
    try:
        yield counter
    finally:
        _traffic.remove(counter)


def count_sent(name: str, num_bytes: int) -> None:
    """Add bytes to the counters of ``measure_traffic``, for messages which this module does not send."""
    # Contexts may be nested, and every counter counts.
    for counter in _traffic:
        counter[name] += num_bytes


def set_timeout(seconds: float) -> None:
    """Set how long collectives in this process wait for other ranks before they fail.

    Applies to all existing process groups and host links.

    Args:
        seconds: timeout, above 0.
    """
    # Before torch 2.14, only the private name exists.
    set_group_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in list(dist.distributed_c10d._world.pg_map):
        set_group_timeout(timedelta(seconds=seconds), group)
        _timeouts[group] = timedelta(seconds=seconds)
    # Links do not use torch's timeout.
    for link in open_links():
        link.timeout_seconds = seconds


def wait_for_message(work: Any, group: dist.ProcessGroup) -> None:
    """Wait until a message between two ranks has been sent or received.

    With gloo, a message keeps the timeout with which its group was created, unless the wait has one.

    Args:
        work: torch's handle of the message.
        group: process group of both ranks.

    Raises:
        RuntimeError: the other rank did not answer within the timeout (see `set_timeout`), or has ended.
    """
    if group in _timeouts:
        work.wait(_timeouts[group])
    else:
        work.wait()


def goes_through_cpu(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether a collective on this tensor must run on a CPU copy, because the group is not NCCL.

    gloo copies CUDA tensors internally, but not in every collective. Logs a warning the first time.
    """
    if tensor.is_cpu or "nccl" in dist.get_backend(group):
        return False
    # Once per process, because every collective would repeat it.
    if tensor.device.type not in _warned_devices:
        _warned_devices.add(tensor.device.type)
        _logger.warning(
            "the process group works on the CPU and tables are on %s: every exchange copies through the "
            "CPU. A group of the backend nccl would not.",
            tensor.device.type,
        )
    return True


def _start_collective(
    start: Callable[[Tensor, Tensor], Any], received: Tensor, sent: Tensor, group: dist.ProcessGroup
) -> Any:
    """Start a collective, on CPU copies if the group needs them.

    Returns:
        An object whose ``wait`` waits until ``received`` is filled.
    """
    if not goes_through_cpu(sent, group):
        return _poll_for_failures(start(received, sent), sent, group)
    # gloo fills this buffer, and `_CopyBack` copies it to the device.
    arrived = torch.empty_like(received, device="cpu")
    copied = sent.cpu()
    return _CopyBack(_poll_for_failures(start(arrived, copied), copied, group), arrived, received)


def _run_on_tensor(start: Callable[[Tensor], Any], tensor: Tensor, axis: Axis, name: str) -> None:
    """Run a collective which changes a tensor in place, and wait for it.

    If the group needs a CPU tensor, run the collective on a CPU copy, and copy the result back. A view with
    gaps is copied, too: gloo would read its memory without regard to strides
    (findings/torch_gloo_collectives_ignore_strides.sh).
    """
    if axis.group is None or axis.size == 1:
        return
    count_start(axis.group)
    try:
        copied = (tensor.cpu() if goes_through_cpu(tensor, axis.group) else tensor).contiguous()
        with blocked():
            _poll_for_failures(start(copied), copied, axis.group).wait()
        if copied is not tensor:
            tensor.copy_(copied)
    except RuntimeError as error:
        raise _collective_error(error, name, axis.group) from error


def _poll_for_failures(work: Any, sent: Tensor, group: dist.ProcessGroup) -> Any:
    """Wrap a gloo collective such that waiting for it notices the failure of another rank.

    Other collectives are returned unchanged.
    """
    return _PolledWork(work, group) if sent.is_cpu and "gloo" in dist.get_backend(group) else work


def named_failure(error: RuntimeError) -> Exception:
    """Convert an error from gloo or NCCL to a CollectiveError which names the failed ranks.

    Other errors are returned unchanged. The function is for collectives which torch itself has started, such
    as those in DistributedDataParallel.
    """
    # This module's own errors name the ranks already.
    is_named = isinstance(error, CollectiveError)
    if is_named or not (isinstance(error, dist.DistError) or _GLOO in str(error)):
        return error
    failure = _collective_error(error, "of all ranks", dist.group.WORLD)
    failure.__cause__ = error
    return failure


def _count_bytes(name: str, tensor: Tensor, elements: list[int], rank: int) -> None:
    """Add the bytes of a collective to the active counters, without the part which this rank keeps."""
    for counter in _traffic:
        counter[name] += (sum(elements) - elements[rank]) * tensor.element_size()


def _has_failed(work: Any) -> bool:
    """Return whether the collective itself has failed, after ``work.wait`` has raised an error.

    Otherwise the error is local to this rank, for example out of memory, or an error raised by the ``reader``
    of ``Reading.wait``. Only work on a host link raises local errors.
    """
    return not isinstance(work, Reading) or bool(work.link.failure)


def _collective_error(error: RuntimeError, name: str, group: dist.ProcessGroup | None) -> Exception:
    """Return the exception to raise for a failed collective.

    If another rank has announced an error, return that error. Otherwise return a CollectiveError with the
    names of the collective and of the ranks that do not respond.
    """
    # The announced error is the cause, and tells more than a broken connection.
    if (failure := lone_failure(group)) is not None:
        return failure
    ranks = dist.get_process_group_ranks(group)
    return CollectiveError(
        f"rank {dist.get_rank()}: the collective '{name}' over ranks {ranks} failed: {_silent_peers(ranks)}. "
        "See the log of that rank for the first error; restart all ranks from the last checkpoint. The "
        f"backend says: {str(error).splitlines()[0]}"
    )


def _silent_peers(ranks: list[int]) -> str:
    """Find out which ranks do not respond, and return a description for an error message.

    Live peers soon report the same failure in the store. The stopped rank may itself host the store, and
    torch's store calls have no deadline. This function therefore queries the store in a daemon thread, and
    abandons the thread if the store does not answer.
    """
    store, host = dist.distributed_c10d._get_default_store(), store_host()
    this_rank, silent = dist.get_rank(), [rank for rank in ranks if rank != dist.get_rank()]
    # Set once the store has answered.
    heard = threading.Event()
    failures: list[str] = []
    deadline = time.monotonic() + _ANSWER_SECONDS

    def ask() -> None:
        """Report this rank as alive, and remove peers from ``silent`` once they have reported, too."""
        try:
            # Tell the peers that this rank is alive and has seen the failure.
            store.set(f"meshrec/failed/{this_rank}", "1")
            heard.set()
            while silent and time.monotonic() < deadline:
                for rank in list(silent):
                    if store.check([f"meshrec/failed/{rank}"]):
                        # The main thread reads the list only after this thread has ended, or ignores it.
                        silent.remove(rank)
                time.sleep(0.05)
        except RuntimeError as error:
            failures.append(str(error).splitlines()[0])

    thread = threading.Thread(target=ask, name="silent peers", daemon=True)
    thread.start()
    # One second more than the deadline, for the last store call.
    thread.join(_ANSWER_SECONDS + 1.0)
    if heard.is_set() and not failures and not thread.is_alive():
        return f"no answer from rank {', '.join(map(str, silent))}" if silent else "all peers still answer"
    # The store does not answer: the failed process hosted it.
    if host == "rank 0" and this_rank != 0:
        return "no answer from rank 0"
    return f"the ranks' store cannot be asked who answers (it is with {host or 'a file'})"
