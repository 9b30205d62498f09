"""Small tensor copies between the host and a device."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to the device without synchronizing.

    Kernels launched later on the current stream see the copy. The host tensor may be freed at once: for
    pageable memory, the driver has staged the bytes when this returns.
    """
    return tensor.to(device, non_blocking=True)


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy vectors with the same dtype and device to the host in one transfer.

    CPU tensors are returned unchanged.
    """
    if tensors[0].is_cpu:
        return list(tensors)
    return list(torch.cat([*tensors]).cpu().split([len(tensor) for tensor in tensors]))


def device_tensor(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return integers as an int64 tensor on the device, without synchronizing; see ``copy_to_device``."""
    return copy_to_device(torch.tensor(values, dtype=torch.int64), device)


def cached_on_device(device: torch.device, values: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
    """Return integers as an int64 tensor on the device, from a cache: equal calls return the same tensor.

    Use it for values repeated in every step. Do not write to the result.
    """
    # The stream is part of the cache key: a copy is only ordered before kernels on the same stream.
    return _cached(tuple(values), device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """Return the current CUDA stream's handle, 0 on the CPU; device copies are cached per stream."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.lru_cache(maxsize=512)
def _cached(values: tuple[Any, ...], device: torch.device, stream: int) -> Tensor:
    return device_tensor(values, device)
