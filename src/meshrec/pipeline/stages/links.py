"""How values get from one stage to another."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class StageLink(ABC):
    """Carries values between stages; each pair of stages has a carrier for each direction, which works beside
    the stages."""

    @abstractmethod
    def ready(self, value: Any) -> Any:
        """Called by the stage that made ``value``: what the carrier has to know to begin."""

    @abstractmethod
    def carry(self, value: Any, ready: Any, destination: torch.device) -> Callable[[], Any]:
        """Called by the carrier. Gives what the stage at the other end calls to have the value."""


class DeviceLink(StageLink):
    """Copies to another device: on CUDA on a stream of its own, so that kernels go on meanwhile."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def ready(self, value: Any) -> torch.cuda.Event | None:
        """An event after what the stage has asked its device to compute."""
        if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(value)):
            event = torch.cuda.Event()
            event.record()
            return event
        return None

    def carry(self, value: Any, ready: Any, destination: torch.device) -> Callable[[], Any]:
        """The copy; on CUDA the stage's stream waits for it, not the stage."""
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
