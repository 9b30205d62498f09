"""Small numbers that the host sends to a device with a kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sent_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor of the host to the device without waiting for what runs there.

    The copy takes its place in the current stream, before the kernel that reads it. The host's memory may be
    freed at once: the driver keeps what it has not sent yet of memory that is not pinned.
    """
    return tensor.to(device, non_blocking=True)


def on_device(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Send int64 numbers to the device; see ``sent_to``."""
    return sent_to(torch.tensor(numbers, dtype=torch.int64), device)
