"""Memory for tables, and for the buffers that a training step allocates and frees."""

import contextlib
import ctypes
import gc
import math
import mmap
import os
import platform
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from meshrec.ops.library import c_entry_points

# Keep a reference: the ops of a Library end with it. Without a kernel, huge pages are just not asked for.
_registration = torch.library.Library("meshrec", "IMPL")
_registration.impl("use_huge_pages", lambda memory: None, "CompositeExplicitAutograd")
_registration.impl("use_huge_pages", lambda memory: None, "Meta")
_registration.impl("new_buffer", lambda like, size: like.new_empty(size), "CompositeExplicitAutograd")
_registration.impl("new_buffer", lambda like, size: like.new_empty(size), "Meta")


def use_huge_pages(memory: Tensor) -> None:
    """Ask the system to back a new, untouched CPU tensor with huge pages, so that random rows miss the TLB
    less often.

    It is only advice. Small tensors, and systems without huge pages, are left as they are.
    """
    if memory.device.type == "cpu":
        torch.ops.meshrec.use_huge_pages(memory)


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return an uninitialised tensor like ``torch.empty``, but let a large CPU tensor begin at a page, a huge
    one if possible.

    Processors fetch cache lines in pairs. Malloc lets a large tensor begin in the middle of a pair, so that a
    row of 256 bytes lies in three pairs instead of two, and random rows are read a fifth slower.
    """
    small = torch.empty(0, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if type(small) is not Tensor or not small.is_cpu or num_bytes < HUGE_PAGE or sys.platform == "win32":
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # torch raises its own error about missing memory
        return torch.empty(shape, dtype=dtype, device=device)
    tensor = torch.frombuffer(pages, dtype=dtype).view(shape)
    use_huge_pages(tensor)
    return tensor


def reserve_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Tensor | None:
    """Return a tensor of zeros that takes memory only where it is written to; None if that is impossible.

    Only its address space is reserved, which may be larger than the memory of the machine.
    """
    small = torch.empty(0, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if type(small) is not Tensor or not small.is_cpu or num_bytes == 0 or _NO_RESERVE is None:
        return None
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, OverflowError):
        return None
    tensor = torch.frombuffer(pages, dtype=dtype).view(shape)
    use_huge_pages(tensor)
    return tensor


def take_pages(address: int, num_bytes: int) -> bool:
    """Take memory for whole pages of reserved addresses now, and not when they are first written to.

    Returns:
        Whether that is possible: on Linux from 5.14 on, as long as there is memory.
    """
    if sys.platform != "linux":
        return False
    pages = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
    return bool(ctypes.CDLL(None).madvise(*pages, _POPULATE_WRITE) == 0)


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """Leave the Python objects that exist now out of garbage collections until the block ends.

    torch alone makes a million of them. A full collection visits them all, and takes a tenth of a second, in
    the middle of a training step or of a request.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# MAP_NORESERVE, which Python names from 3.13 on.
_NO_RESERVE: int | None = getattr(
    mmap,
    "MAP_NORESERVE",
    0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else None,
)
HUGE_PAGE = 1 << 21
"""The bytes of a huge page."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python does not name
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
_KEPT_BYTES, _GROWTH_BYTES, _LARGEST_BYTES = 1 << 28, 1 << 24, 1 << 25
_USERS_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Let the process keep up to 256 MiB that a training step frees, for the next step.

    By default, glibc returns buffers of a few megabytes to the system as soon as they are free, and every
    step then waits for thousands of page faults while it gets them again. Blocks above 32 MiB are still
    returned. The compiled kernels also place their large buffers side by side, apart from malloc's heap, so
    that the next phase of a step reuses the memory of the last one (with torch 2.11 and later). Up to 256 MiB
    of these are kept, too. Nothing changes with other C libraries, or if the user has set malloc's
    environment variables (``MALLOC_TRIM_THRESHOLD_``, ``GLIBC_TUNABLES``, ...).

    Returns:
        Whether the settings were applied.
    """
    chosen = any(name in os.environ for name in _USERS_CHOICE)
    if sys.platform != "linux" or chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        return False
    wanted = (
        (_M_MMAP_THRESHOLD, _LARGEST_BYTES),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_TOP_PAD, _GROWTH_BYTES),
    )
    if (library := c_entry_points()) is not None:
        library.meshrec_keep_buffers()
    return all(mallopt(option, value) == 1 for option, value in wanted)
