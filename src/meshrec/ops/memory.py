"""Memory for tables, and for what a training step allocates and frees."""

import ctypes
import math
import mmap
import os
import sys

import torch
from torch import Tensor

from meshrec.ops.library import c_entry_points

# Alive as long as the op: huge pages are an advice to the system; where no kernel gives it nothing is lost.
_registration = torch.library.Library("meshrec", "IMPL")
_registration.impl("use_huge_pages", lambda memory: None, "CompositeExplicitAutograd")
_registration.impl("use_huge_pages", lambda memory: None, "Meta")
_registration.impl("new_buffer", lambda like, size: like.new_empty(size), "CompositeExplicitAutograd")
_registration.impl("new_buffer", lambda like, size: like.new_empty(size), "Meta")


def use_huge_pages(memory: Tensor) -> None:
    """Asks the system to back a new, untouched CPU tensor with huge pages: random rows miss the TLB less.

    An advice: systems that do not know it, and small tensors, are left as they are.
    """
    if memory.device.type == "cpu":
        torch.ops.meshrec.use_huge_pages(memory)


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Like ``torch.empty``, but a large CPU tensor begins with a page of memory, a huge one where it can.

    Processors fetch cache lines in pairs. Malloc lets a large tensor begin in the middle of a pair, so that
    a row of 256 bytes lies in three of them in place of two, and random rows are read a fifth slower.
    """
    small = torch.empty(0, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if type(small) is not Tensor or not small.is_cpu or num_bytes < _HUGE_PAGE or sys.platform == "win32":
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # torch says in its own words that there is not enough memory
        return torch.empty(shape, dtype=dtype, device=device)
    tensor = torch.frombuffer(pages, dtype=dtype).view(shape)
    use_huge_pages(tensor)
    return tensor


_HUGE_PAGE = 1 << 21
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
_KEPT_BYTES, _GROWTH_BYTES, _LARGEST_BYTES = 1 << 28, 1 << 24, 1 << 25
_USERS_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Lets the process keep what a training step frees, up to 256 MiB, for the next step.

    By itself glibc hands buffers of a few megabytes back to the system as soon as they are free, and every
    step then waits for thousands of page faults while it gets them anew. Blocks above 32 MiB are still handed
    back. The compiled kernels moreover lay their large buffers side by side, apart from malloc's heap, where
    what one phase of a step frees serves the next one (with torch 2.11 and later); of these, too, up to
    256 MiB are kept. Where the user has set malloc's environment variables (``MALLOC_TRIM_THRESHOLD_``,
    ``GLIBC_TUNABLES``, ...), and with other C libraries, nothing changes.

    Returns:
        Whether it was done.
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
