"""Batch copies to the device during computation."""

from collections.abc import Mapping
from typing import Any

import torch


class Mover:
    """Copies batches to ``device``, on CUDA in a separate stream. None leaves batches where they are."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None

    def moved(self, batch: Any) -> Any:
        """Return the batch on the device. The copy may still be in flight, see ``wait``.

        Objects with a ``to`` method are moved, alone or in tuples, lists and mappings.
        """
        if self._device is None:
            return batch
        with torch.cuda.stream(self._stream):  # no stream on a CPU
            return _moved(batch, self._device)

    def wait(self, batch: Any) -> None:
        """Make computation from now on wait for the copy."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            # The copy's memory belongs to the side stream; without this, it could be reused too early.
            _record(batch, current)


def _moved(thing: Any, device: torch.device) -> Any:
    if hasattr(thing, "to"):
        return thing.to(device, non_blocking=True)
    if isinstance(thing, Mapping):
        return {name: _moved(part, device) for name, part in thing.items()}
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_moved(part, device) for part in thing))
    if isinstance(thing, list | tuple):
        return type(thing)(_moved(part, device) for part in thing)
    return thing


def _record(thing: Any, stream: Any) -> None:
    """Keep the copy's memory until ``stream`` has used it."""
    if hasattr(thing, "record_stream"):
        thing.record_stream(stream)
    elif isinstance(thing, Mapping):
        for part in thing.values():
            _record(part, stream)
    elif isinstance(thing, list | tuple):
        for part in thing:
            _record(part, stream)
