"""Copies of small tensors between the host and a device."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor of the host to the device without waiting for the device.

    The copy is ordered in the current stream, before the kernel that reads it. The host's memory may be freed
    at once: for memory that is not pinned, the driver keeps the bytes that it has not sent yet.
    """
    return tensor.to(device, non_blocking=True)


def read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one dimension and one type on the host, with a single read of their device.

    Tensors of the host are returned themselves.
    """
    if tensors[0].is_cpu:
        return list(tensors)
    return list(torch.cat([*tensors]).cpu().split([len(each) for each in tensors]))


def on_device(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy integers to the device as int64; see ``sent_to``."""
    return sent_to(torch.tensor(numbers, dtype=torch.int64), device)


def kept_on(device: torch.device, numbers: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
    """Return integers as an int64 tensor on the device; equal calls return the same tensor.

    It is meant for numbers that are the same in every step. Do not write to the result.
    """
    return _kept(tuple(numbers), device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """Return the number of the device's current stream. What was sent in another may not have arrived."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.lru_cache(maxsize=512)
def _kept(numbers: tuple[Any, ...], device: torch.device, stream: int) -> Tensor:
    return on_device(numbers, device)
