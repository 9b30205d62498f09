"""Batch interfaces for pipelines."""

from abc import ABC, abstractmethod

import torch


class Multistreamable(ABC):
    """Object that CUDA streams other than its creation stream may use."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work queued on ``stream`` has finished."""


@Multistreamable.register
class Pipelineable(ABC):
    """Batch which a pipeline copies to a device before it is used. Subclasses implement both methods."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work queued on ``stream`` has finished."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool) -> "Pipelineable":
        """Return a copy on another device."""
