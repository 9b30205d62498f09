"""Copies of small tensors from the host to a device, before the kernel that reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sent_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor of the host to the device without waiting for the device.

    The copy is ordered in the current stream, before the kernel that reads it. The host's memory may be freed
    at once: for memory that is not pinned, the driver keeps the bytes that it has not sent yet.
    """
    return tensor.to(device, non_blocking=True)


def on_device(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy integers to the device as int64; see ``sent_to``."""
    return sent_to(torch.tensor(numbers, dtype=torch.int64), device)
