"""Memory allocation for tables, and for temporary buffers in a training step."""

import contextlib
import ctypes
import gc
import math
import mmap
import os
import platform
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from meshrec.lazy import is_command
from meshrec.ops import operators
from meshrec.ops.library import c_entry_points

# torch.library.Library unregisters its operators when garbage collected, so keep a reference. Without a
# kernel, huge pages are not requested.
_registration = torch.library.Library("meshrec", "IMPL")
_registration.impl("use_huge_pages", lambda memory: None, "CompositeExplicitAutograd")
_registration.impl("use_huge_pages", lambda memory: None, "Meta")
_registration.impl("new_buffer", lambda like, size: like.new_empty(size), "CompositeExplicitAutograd")
_registration.impl("new_buffer", lambda like, size: like.new_empty(size), "Meta")


def use_huge_pages(memory: Tensor) -> None:
    """Ask the system to use huge pages for a new CPU tensor that nothing has been written to yet.

    With huge pages, random row reads miss the TLB less often. No effect on small tensors, and on systems
    without huge pages.
    """
    # Huge pages are a matter of CPU memory only.
    if memory.device.type == "cpu":
        operators.use_huge_pages(memory)


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return an uninitialized tensor like ``torch.empty``. A large CPU tensor starts at a memory page.

    Processors fetch cache lines in pairs. malloc may start a large tensor in the middle of a pair. A row with
    256 bytes then touches three pairs instead of two, and random row reads take 20 % longer.

    Args:
        device: target device, or None for the default device.
    """
    # An empty probe tensor resolves the default device, and shows whether a mode such as FakeTensorMode
    # replaces tensors by a subclass.
    small = torch.empty(0, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    # Tensors below a huge page stay with malloc, which reuses freed blocks.
    if type(small) is not Tensor or not small.is_cpu or num_bytes < HUGE_PAGE or sys.platform == "win32":
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # torch raises its own error about missing memory
        return torch.empty(shape, dtype=dtype, device=device)
    # The tensor keeps the mapping alive. The system unmaps it when the last tensor is gone.
    tensor = torch.frombuffer(pages, dtype=dtype).view(shape)
    use_huge_pages(tensor)
    return tensor


def reserve_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Tensor | None:
    """Return a zero tensor whose memory is allocated page by page, at the first write. None if not supported.

    The call reserves only address space, which may exceed the physical memory.

    Args:
        device: target device, or None for the default device.
    """
    # As in empty_pages: resolves the default device, and detects modes that replace tensors.
    small = torch.empty(0, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if type(small) is not Tensor or not small.is_cpu or num_bytes == 0 or _NO_RESERVE is None:
        return None
    try:
        # Without a swap reservation, the range may exceed the physical memory.
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, OverflowError):
        return None
    tensor = torch.frombuffer(pages, dtype=dtype).view(shape)
    use_huge_pages(tensor)
    return tensor


def populate_pages(address: int, num_bytes: int) -> bool:
    """Allocate the memory pages in an address range now, instead of at the first write.

    Args:
        address: start, at a page boundary.

    Returns:
        Whether the pages were allocated. This needs Linux 5.14 or later, and free memory.
    """
    if sys.platform != "linux":
        return False
    # Explicit types, because ctypes would pass Python integers as 32-bit values.
    pages = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
    return bool(ctypes.CDLL(None).madvise(*pages, _POPULATE_WRITE) == 0)


# by_program: a yes of `_is_frozen_by_program`, until the process ends. by_block: whether a `frozen_objects`
# block has frozen the objects that are frozen now.
_frozen = {"by_program": False, "by_block": False}


def _is_frozen_by_program() -> bool:
    """Return whether the program itself has called ``gc.freeze``.

    After True, all later calls return True without counting frozen objects, which takes up to 80 ms.
    """
    if not _frozen["by_program"] and not _frozen["by_block"]:
        _frozen["by_program"] = gc.get_freeze_count() > 0
    return _frozen["by_program"]


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """Exclude the existing Python objects from garbage collection until the with block ends.

    Importing torch creates a million objects. A full collection visits all of them, which stalls a training
    step or a request for 100 ms.

    If the program has frozen objects before, they stay frozen after the block. ``gc.unfreeze`` cannot
    unfreeze only some objects, so in this case the block freezes nothing more. MeshRec's own command is an
    exception: in it, the block freezes the other objects too, and all stay frozen.
    """
    is_first = not _is_frozen_by_program() and not _frozen["by_block"]
    if is_first or is_command():
        _frozen["by_block"] = _frozen["by_block"] or is_first
        # Collect first: freeze() also keeps unreachable objects that are still in memory.
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if is_first:
            gc.unfreeze()
            _frozen["by_block"] = False


# MAP_NORESERVE, which Python names from 3.13 on.
_NO_RESERVE: int | None = getattr(
    mmap,
    "MAP_NORESERVE",
    0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else None,
)
HUGE_PAGE = 1 << 21
"""Bytes per huge page."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python does not name
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
# 32 MiB is the largest threshold glibc accepts for M_MMAP_THRESHOLD on 64-bit systems.
_RETAINED_BYTES, _GROWTH_BYTES, _LARGEST_BYTES = 1 << 28, 1 << 24, 1 << 25
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Let the process keep up to 256 MiB that a training step frees, for use in the next step.

    By default, glibc returns large buffers to the system at once, and every step waits for thousands of page
    faults to get them back. Blocks above 32 MiB are still returned. With torch 2.11 or later, the compiled
    kernels also keep up to 256 MiB in large buffers outside malloc's heap. These buffers are adjacent, so the
    phases of a step reuse the same memory.

    A long run returns this memory with `return_freed_memory`. No effect with other C libraries, or if the
    user has set malloc's environment variables (``MALLOC_TRIM_THRESHOLD_``, ``GLIBC_TUNABLES``, ...).

    Returns:
        Whether the settings were applied.
    """
    # mallopt would override the user's settings.
    set_by_user = any(name in os.environ for name in _USER_SETTINGS)
    mallopt = _of_glibc("mallopt")
    if set_by_user or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or mallopt is None:
        return False
    # A threshold of 32 MiB keeps buffers in the heap, which is trimmed only above 256 MiB and grows by 16
    # MiB.
    options = (
        (_M_MMAP_THRESHOLD, _LARGEST_BYTES),
        (_M_TRIM_THRESHOLD, _RETAINED_BYTES),
        (_M_TOP_PAD, _GROWTH_BYTES),
    )
    if (library := c_entry_points()) is not None:
        library.meshrec_keep_buffers()
    return all(mallopt(option, value) == 1 for option, value in options)


def return_freed_memory() -> None:
    """Return the pages of freed memory to the system, also those between blocks in use.

    A process whose steps differ, such as one that also writes deltas, keeps more and more memory between its
    blocks, up to the limit of `keep_freed_memory` and beyond. No effect with other C libraries.
    """
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None if this is not glibc, or has no such function."""
    is_glibc = sys.platform == "linux" and "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    return getattr(ctypes.CDLL(None), name, None) if is_glibc else None
