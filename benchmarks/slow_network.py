"""A simulated network for benchmarks: gloo with a chosen latency and bandwidth.

Ranks on one machine exchange data too fast to show what a pipeline hides. ``init_process_group("slow_gloo")``
makes a process group whose collectives end no earlier than *start + latency + bytes / bandwidth*, whether
MeshRec, DistributedDataParallel or another library starts them; it has no messages between two ranks. A rank
that waits sleeps, and leaves its core to others.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "slow_gloo"
_COLLECTIVES = (
    "allgather",
    "all_gather_single",
    "allreduce",
    "alltoall",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
)
_SPLIT_COLLECTIVE = "all_to_all_single"
# What torch before 2.13 calls them.
_OLDER = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}


class _Link:
    """This rank's outgoing link, which sends one message after the other."""

    def __init__(self) -> None:
        self.latency_seconds, self.bytes_per_second = 0.0, float("inf")
        self._free_at = 0.0
        self._lock = threading.Lock()

    def arrival(self, num_bytes: float) -> float:
        """Return the time at which ``num_bytes`` sent now have arrived."""
        with self._lock:
            self._free_at = max(time.monotonic(), self._free_at) + num_bytes / self.bytes_per_second
            return self._free_at + self.latency_seconds


_link = _Link()


def set_network(*, latency_seconds: float = 0.0, bytes_per_second: float = float("inf")) -> None:
    """Set the least duration of all later collectives of this process in "slow_gloo" groups.

    Call this on every rank. An all-reduce counts twice its tensor, as in a ring; other collectives count the
    larger of input and output. Both are reduced by this rank's own share, which is that of the splits if
    there are any.

    Args:
        latency_seconds: latency of a collective.
        bytes_per_second: bandwidth of this rank's link.
    """
    _link.latency_seconds, _link.bytes_per_second = latency_seconds, bytes_per_second


class _SlowWork(dist._Work):  # type: ignore[name-defined,misc]
    """A gloo collective that does not finish before its arrival time."""

    def __init__(self, group: "_SlowGloo", work: Any, tensors: list[Tensor], num_bytes: float) -> None:
        super().__init__()
        self._group, self._work, self._tensors = group, work, tensors
        self._arrival = _link.arrival(num_bytes)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Sleep until the collective has finished."""
        self._work.wait() if not timeout else self._work.wait(timeout)
        while (left := self._arrival - time.monotonic()) > 0:
            time.sleep(left)
        return True

    def is_completed(self) -> bool:
        return time.monotonic() >= self._arrival and bool(self._work.is_completed())

    def get_future(self) -> Any:
        """Return a future that a thread of the group fulfils; DistributedDataParallel needs one."""
        future: Any = torch.futures.Future()
        self._group.fulfil(self, future, self._tensors)
        return future


class _SlowGloo(dist.ProcessGroup):
    """A process group that delays the collectives of a gloo group of the same ranks; see `set_network`."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )
        self._name = options.group_id
        self._promises: queue.SimpleQueue[tuple[_SlowWork, Any, list[Tensor]]] = queue.SimpleQueue()
        self._keeper: threading.Thread | None = None

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> Any:
        return self._name

    def barrier(self, *args: Any, **options: Any) -> _SlowWork:
        return _SlowWork(self, self._gloo.barrier(*args, **options), [], 0.0)

    def run(self, name: str, *args: Any, **options: Any) -> _SlowWork:
        """Run a collective of gloo."""
        results = [args[0]] if isinstance(args[0], Tensor) else list(args[0])
        work = getattr(self._gloo, name, None) or getattr(self._gloo, _OLDER[name])
        if name == _SPLIT_COLLECTIVE or _OLDER.get(_SPLIT_COLLECTIVE) == name:
            num_bytes: float = max(map(self._bytes_of_others, args[:2], args[2:4]))
        else:
            largest = max(_num_bytes(args[0]), _num_bytes(args[1]) if len(args) > 1 else 0)
            num_bytes = (2 if name == "allreduce" else 1) * largest * (1 - 1 / self.size())
        return _SlowWork(self, work(*args, **options), results, num_bytes)

    def _bytes_of_others(self, tensor: Tensor, splits: Sequence[int]) -> float:
        """Return the bytes of an all-to-all's tensor that are not this rank's; no splits mean equal ones."""
        if not splits:
            return tensor.nbytes * (1 - 1 / self.size())
        return tensor.nbytes * (1 - splits[self.rank()] / max(sum(splits), 1))

    def fulfil(self, work: _SlowWork, future: Any, result: list[Tensor]) -> None:
        """Fulfil ``future`` when ``work`` has finished. Futures are fulfilled in the order of these calls."""
        if self._keeper is None:
            self._keeper = threading.Thread(target=_keep, args=(self._promises,), daemon=True)
            self._keeper.start()
        self._promises.put((work, future, result))


def _keep(promises: "queue.SimpleQueue[tuple[_SlowWork, Any, list[Tensor]]]") -> None:
    while True:
        work, future, result = promises.get()
        try:
            work.wait()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        del work, future, result


def _num_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_num_bytes, value)) if isinstance(value, Sequence) else 0


def _collective(name: str) -> Callable[..., _SlowWork]:
    def run(self: _SlowGloo, *args: Any, **options: Any) -> _SlowWork:
        return self.run(name, *args, **options)

    return run


for _name in _COLLECTIVES:
    for _spelling in {_name, _OLDER.get(_name, _name)}:
        setattr(_SlowGloo, _spelling, _collective(_name))


dist.Backend.register_backend(
    BACKEND, lambda options, _: _SlowGloo(options), extended_api=True, devices=["cpu"]
)
