"""Copies of small tensors between the host and a device."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to the device without waiting for the device.

    Kernels that are launched later on the current stream see the copy. The caller may free the host tensor
    at once: if it is pageable memory, the driver has staged its bytes before this function returns.
    """
    return tensor.to(device, non_blocking=True)


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy several vectors with the same dtype and device to the host, in a single transfer.

    The transfer waits for the device. CPU tensors are returned unchanged.
    """
    # Nothing to transfer.
    if tensors[0].is_cpu:
        return list(tensors)
    # One transfer instead of several, each of which would wait for the device.
    return list(torch.cat([*tensors]).cpu().split([len(tensor) for tensor in tensors]))


def device_tensor(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy integers to an int64 tensor on the device, without waiting for it; see ``copy_to_device``."""
    return copy_to_device(torch.tensor(values, dtype=torch.int64), device)


def cached_on_device(device: torch.device, values: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
    """Return integers as an int64 tensor on the device, from a cache of earlier results.

    Use it for values that repeat in every step, which are then copied only once. Equal arguments give the
    same tensor, so do not write to it.
    """
    # The stream is part of the cache key: a copy is only ordered before kernels on the same stream.
    return _cached_copy(tuple(values), device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """Return the handle of the current CUDA stream, 0 on the CPU. Device tensor caches use it as a key."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.lru_cache(maxsize=512)
def _cached_copy(values: tuple[Any, ...], device: torch.device, stream: int) -> Tensor:
    return device_tensor(values, device)
