"""What pipelines ask of a batch."""

from abc import ABC, abstractmethod

import torch


class Multistreamable(ABC):
    """What may be used on another stream than the one it was made on."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory until the work queued on ``stream`` is done."""


@Multistreamable.register
class Pipelineable(ABC):
    """What can be moved to a device ahead of its use; it is ``Multistreamable`` too."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory until the work queued on ``stream`` is done."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool) -> "Pipelineable":
        """On another device."""
