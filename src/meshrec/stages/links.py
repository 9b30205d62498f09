"""Links between stages in the same process."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override


class StageLink(ABC):
    """Link that moves values from the computing stage's device to the device of a stage that reads them.

    Subclass it to replace the transport in `Staged`. The sending stage calls `ready` and continues with other
    work. A copy thread then calls `carry`. There is a copy thread for every pair of a sending and a
    receiving stage.
    """

    @abstractmethod
    def ready(self, value: Any) -> Any:
        """Return an object for `carry` to wait on until ``value`` is computed, such as a CUDA event.

        The sending stage calls this method right after it has launched the computation.

        Args:
            value: nested container with the tensors to send.
        """

    @abstractmethod
    def carry(self, value: Any, ready: Any, destination: torch.device) -> Callable[[], Any]:
        """Move ``value`` to another device. The copy thread calls this method.

        Args:
            value: nested container with the tensors to send.
            ready: `ready` result.
            destination: the receiving stage's device.

        Returns:
            Function without arguments that the receiving stage calls in the stage's thread. It returns
            the value on ``destination``.
        """


class DeviceLink(StageLink):
    """Link that copies values between devices. CUDA copies use a separate stream and overlap with kernels."""

    def __init__(self) -> None:
        # A copy stream per destination, for the lifetime of the link.
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def ready(self, value: Any) -> torch.cuda.Event | None:
        """Return a CUDA event which fires when the kernels launched so far by the sending stage have ended.

        The result is None if the value has no CUDA tensor.
        """
        if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(value)):
            event = torch.cuda.Event()
            event.record()
            return event
        return None

    @override
    def carry(self, value: Any, ready: Any, destination: torch.device) -> Callable[[], Any]:
        """Copy ``value`` to ``destination``.

        If the destination is a CUDA device, this call only launches the copy. The receiving stage's CUDA
        stream waits for the copy; no thread does.
        """
        if destination.type != "cuda":
            # The host must not read the copy before the sending kernels have finished.
            if ready is not None:
                ready.synchronize()
            moved = _copy_to(value, destination)
            return lambda: moved
        # A separate stream, so that the copy does not wait for later kernels of the sending stage.
        stream = self._streams.setdefault(destination, torch.cuda.Stream(destination))
        with torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            # Allocated on the copy stream, see arrive().
            moved = _copy_to(value, destination)
            copied = torch.cuda.Event()
            copied.record(stream)

        def arrive() -> Any:
            """Make the receiving stage's CUDA stream wait for the copy, and return the copied value."""
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
    """Return ``value`` with all tensors copied to ``destination``."""
    return pytree.tree_map(
        lambda leaf: leaf.to(destination, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value
    )
