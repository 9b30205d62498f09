"""The collectives that sharded modules use: started here, waited for where the value is needed.

A failure names the collective, this rank, and the ranks that do not answer; that is found out through the store of
the process group, since a broken connection tells an address, not a rank.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.distributed.mesh import Axis

_ANSWER_SECONDS = 3.0
# The older name warns where the newer one exists.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_traffic: list[Counter[str]] = []


class CollectiveError(RuntimeError):
    """A collective did not finish: a peer died, hung, or left."""


@dataclass
class InFlight:
    """A collective under way; ``wait`` gives the tensor that it fills."""

    tensor: Tensor
    work: Any
    name: str
    group: dist.ProcessGroup | None

    def wait(self) -> Tensor:
        """Blocks (on CUDA: the current stream) until the tensor is filled. Raises CollectiveError."""
        if self.work is not None:
            work, self.work = self.work, None
            with _explained(self.name, self.group):
                work.wait()
        return self.tensor


class Splits(NamedTuple):
    """Elements for (or from) each rank of an axis."""

    sent: list[int]
    received: list[int]


def all_to_all(sent: Tensor, splits: Splits, axis: Axis, name: str) -> InFlight:
    """Starts sending consecutive pieces of a 1-D tensor to the ranks of an axis."""
    if axis.group is None or axis.size == 1:
        return InFlight(sent, None, name, None)
    _count(name, sent, splits.sent, axis.rank)
    received = sent.new_empty(sum(splits.received))
    with _explained(name, axis.group):
        work = dist.all_to_all_single(
            received, sent, splits.received, splits.sent, group=axis.group, async_op=True
        )
    return InFlight(received, work, name, axis.group)


def all_gather(sent: Tensor, axis: Axis, name: str) -> InFlight:
    """Starts gathering tensors of one shape: [size of the axis, *shape]."""
    if axis.group is None or axis.size == 1:
        return InFlight(sent[None], None, name, None)
    _count(name, sent, [sent.numel()] * axis.size, axis.rank)
    received = sent.new_empty(axis.size * sent.numel())
    with _explained(name, axis.group):
        work = _all_gather(received, sent.reshape(-1), group=axis.group, async_op=True)
    return InFlight(received.view(axis.size, *sent.shape), work, name, axis.group)


def all_reduce(tensor: Tensor, axis: Axis, name: str) -> InFlight:
    """Starts summing a tensor over an axis, in place."""
    if axis.group is None or axis.size == 1:
        return InFlight(tensor, None, name, None)
    _count(name, tensor, [tensor.numel() * 2 // axis.size] * axis.size, axis.rank)
    with _explained(name, axis.group):
        work = dist.all_reduce(tensor, group=axis.group, async_op=True)
    return InFlight(tensor, work, name, axis.group)


def gather_objects(item: object, axis: Axis, name: str) -> list[Any]:
    """What every rank of an axis has; for start-up and failures only."""
    if axis.group is None or axis.size == 1:
        return [item]
    items: list[Any] = [None] * axis.size
    with _explained(name, axis.group):
        dist.all_gather_object(items, item, group=axis.group)
    return items


@contextmanager
def measure_traffic() -> Iterator[Counter[str]]:
    """Counts the bytes that this rank sends to others, by the name of the collective."""
    counter: Counter[str] = Counter()
    _traffic.append(counter)
    try:
        yield counter
    finally:
        _traffic.remove(counter)


def _count(name: str, tensor: Tensor, elements: list[int], own: int) -> None:
    for counter in _traffic:
        counter[name] += (sum(elements) - elements[own]) * tensor.element_size()


class _explained:  # noqa: N801 - reads as a word where it is used
    """Turns an error of the backend into one that names collective and peers (a class: it is on the hot path)."""

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self.name, self.group = name, group

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and self.group is not None:
            ranks = dist.get_process_group_ranks(self.group)
            silent = _silent_peers(ranks)
            whom = f"no answer from rank {', '.join(map(str, silent))}" if silent else "all peers still answer"
            raise CollectiveError(
                f"rank {dist.get_rank()}: the collective '{self.name}' over ranks {ranks} failed: {whom}. "
                "See the log of that rank for the first error; restart all ranks from the last checkpoint. "
                f"The backend says: {str(error).splitlines()[0]}"
            ) from error


def _silent_peers(ranks: list[int]) -> list[int]:
    """The ranks that do not report a failure of their own soon: a live peer sees this collective fail, too."""
    me = dist.get_rank()
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"meshrec/failed/{me}", "1")
        waiting = [rank for rank in ranks if rank != me]
        deadline = time.monotonic() + _ANSWER_SECONDS
        while waiting and time.monotonic() < deadline:
            waiting = [rank for rank in waiting if not store.check([f"meshrec/failed/{rank}"])]
            time.sleep(0.05)
    except RuntimeError:
        return [0]  # the store lives in rank 0
    return waiting


def host_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``; itself when it is there already."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)
