"""Links which carry values between stages."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class StageLink(ABC):
    """Carries values between stages. A pair of stages has a carrier thread per direction, in addition to the
    stage threads.
    """

    @abstractmethod
    def ready(self, value: Any) -> Any:
        """Return whatever the carrier must wait for. Called by the stage which computed ``value``."""

    @abstractmethod
    def carry(self, value: Any, ready: Any, destination: torch.device) -> Callable[[], Any]:
        """Carry a value. Called by the carrier thread.

        Args:
            value: value to carry.
            ready: `ready` result.
            destination: the receiving stage's device.

        Returns:
            Function which the receiving stage calls to get the value.
        """


class DeviceLink(StageLink):
    """Copies values to another device; on CUDA on a separate stream, so that kernels overlap."""

    def __init__(self) -> None:
        # A copy stream per destination, for the lifetime of the link.
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def ready(self, value: Any) -> torch.cuda.Event | None:
        """Return an event recorded after the kernels launched by the stage."""
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
            Function which returns the copy on the receiving stage.
        """
        if destination.type != "cuda":
            if ready is not None:
                ready.synchronize()
            moved = _moved(value, destination)
            return lambda: moved
        stream = self._streams.setdefault(destination, torch.cuda.Stream(destination))
        with torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            moved = _moved(value, destination)
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


def _moved(value: Any, destination: torch.device) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.to(destination, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value
    )
