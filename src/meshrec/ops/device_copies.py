"""Copies of small tensors between the host and a device."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to the device without synchronizing.

    The copy is ordered in the current stream, before kernels launched later. The host memory may be freed at
    once: for pageable memory, the driver stages the bytes.
    """
    return tensor.to(device, non_blocking=True)


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy vectors with the same dtype to the host, in a single device read.

    Host tensors are returned unchanged.
    """
    if tensors[0].is_cpu:
        return list(tensors)
    return list(torch.cat([*tensors]).cpu().split([len(tensor) for tensor in tensors]))


def device_tensor(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy integers to the device as an int64 tensor; see ``copy_to_device``."""
    return copy_to_device(torch.tensor(values, dtype=torch.int64), device)


def cached_on_device(device: torch.device, values: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
    """Return integers as an int64 tensor on the device. Equal calls return the same tensor.

    For values that repeat in every step. Do not write to the result.
    """
    # The stream is part of the cache key: a copy is only ordered before kernels on the same stream.
    return _cached(tuple(values), device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """Return the current stream's handle. Copies issued on another stream may not have arrived."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.lru_cache(maxsize=512)
def _cached(values: tuple[Any, ...], device: torch.device, stream: int) -> Tensor:
    return device_tensor(values, device)
