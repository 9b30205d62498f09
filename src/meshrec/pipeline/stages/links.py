"""Links that carry values from one stage to another."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class StageLink(ABC):
    """Carries values between stages. Each pair of stages has one carrier thread per direction, beside the
    stages.
    """

    @abstractmethod
    def ready(self, value: Any) -> Any:
        """Return what the carrier needs before it can begin. Called by the stage that made ``value``."""

    @abstractmethod
    def carry(self, value: Any, ready: Any, destination: torch.device) -> Callable[[], Any]:
        """Carry ``value``; return a function that the receiving stage calls to get it. Called by the
        carrier.
        """


class DeviceLink(StageLink):
    """Copies values to another device; on CUDA on a separate stream, so that kernels go on meanwhile."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def ready(self, value: Any) -> torch.cuda.Event | None:
        """Return an event after the kernels that the stage has launched."""
        if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(value)):
            event = torch.cuda.Event()
            event.record()
            return event
        return None

    def carry(self, value: Any, ready: Any, destination: torch.device) -> Callable[[], Any]:
        """Copy the value. On CUDA the receiving stage's stream waits for the copy; its thread does not."""
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
            done = torch.cuda.Event()
            done.record(stream)

        def arrive() -> Any:
            current = torch.cuda.current_stream(destination)
            current.wait_event(done)
            for leaf in pytree.tree_leaves(moved):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(current)
            return moved

        return arrive


def _moved(value: Any, destination: torch.device) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.to(destination, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value
    )
