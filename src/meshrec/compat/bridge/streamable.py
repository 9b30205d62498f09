"""The methods of a batch that pipelines need."""

from abc import ABC, abstractmethod

import torch


class Multistreamable(ABC):
    """An object that may be used on another stream than the one it was made on."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work queued on ``stream`` is done."""


@Multistreamable.register
class Pipelineable(ABC):
    """An object that can be moved to a device ahead of its use. It is ``Multistreamable`` as well."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work queued on ``stream`` is done."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool) -> "Pipelineable":
        """Return the object on another device."""
