"""Links between stages in the same process."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class StageLink(ABC):
    """Carries values between stages. Every pair of stages has a carrier thread in either direction."""

    @abstractmethod
    def ready(self, value: Any) -> Any:
        """Return an object for `carry` to wait on, such as a CUDA event.

        The sending stage calls this method.
        """

    @abstractmethod
    def carry(self, value: Any, ready: Any, destination: torch.device) -> Callable[[], Any]:
        """Carry a value. The carrier thread calls this method.

        Args:
            value: value to carry.
            ready: `ready` result.
            destination: the receiving stage's device.

        Returns:
            Function called by the receiving stage to get the value.
        """


class DeviceLink(StageLink):
    """Copies values to another device; on CUDA on a separate stream, so that kernels overlap."""

    def __init__(self) -> None:
        # A copy stream per destination, for the lifetime of the link.
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def ready(self, value: Any) -> torch.cuda.Event | None:
        """Return a CUDA event after all kernels launched by the stage; None for values on the CPU."""
        if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(value)):
            event = torch.cuda.Event()
            event.record()
            return event
        return None

    def carry(self, value: Any, ready: Any, destination: torch.device) -> Callable[[], Any]:
        """Copy a value. On CUDA, the receiving stream waits for the copy; the thread does not.

        Args:
            value: value to copy.
            ready: `ready` result.
            destination: target device.

        Returns:
            Function that returns the copy on the receiving stage.
        """
        if destination.type != "cuda":
            if ready is not None:
                ready.synchronize()
            moved = _copy_to(value, destination)
            return lambda: moved
        stream = self._streams.setdefault(destination, torch.cuda.Stream(destination))
        with torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            moved = _copy_to(value, destination)
            copied = torch.cuda.Event()
            copied.record(stream)

        def arrive() -> Any:
            current = torch.cuda.current_stream(destination)
            current.wait_event(copied)
            for leaf in pytree.tree_leaves(moved):
                if isinstance(leaf, Tensor):
                    # The copy stream allocated this memory. Without the record, it could be reused while the
                    # stage still reads.
                    leaf.record_stream(current)
            return moved

        return arrive


def _copy_to(value: Any, destination: torch.device) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.to(destination, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value
    )
