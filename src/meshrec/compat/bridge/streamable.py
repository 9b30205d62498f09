"""Batch interfaces for pipelines."""

from abc import ABC, abstractmethod

import torch


class Multistreamable(ABC):
    """Object for use on other streams than the stream it was created on."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work queued on ``stream`` has finished."""


@Multistreamable.register
class Pipelineable(ABC):
    """Object with a move to a device ahead of use. Also ``Multistreamable``."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work queued on ``stream`` has finished."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool) -> "Pipelineable":
        """Return a copy on another device."""
