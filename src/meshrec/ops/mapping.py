"""Memory-mapped files: reads do not crash if another process truncates the file."""

import contextlib
import ctypes
import os
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops.library import c_functions

_library = c_functions(
    map=(ctypes.c_void_p, [ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int)]),
    lost_pages=(ctypes.c_uint64, [ctypes.c_int]),
    unmap=(None, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]),
    expect_misses=(None, [ctypes.c_int]),
)


class Mapping(NamedTuple):
    """A file mapped into memory.

    Attributes:
        content: file bytes, uint8 [num_bytes]. The mapping is private: a write changes a copy of the page,
            never the file.
        guard: number of the mapping in the compiled library, for `lost_pages`; -1 without the kernels.
    """

    content: Tensor
    guard: int


def map_file(descriptor: int, num_bytes: int) -> Mapping:
    """Map the first ``num_bytes`` bytes of an open file into memory.

    If the file is truncated later, reads past the new end return zeros, and `lost_pages` counts them. Without
    the kernels, such a read ends the process (SIGBUS).

    Args:
        descriptor: file descriptor. The caller may close it afterwards.
        num_bytes: bytes to map, at least 1.

    Raises:
        OSError: the system cannot map the file.
    """
    if _library is None:
        # torch opens files by name. This name refers to the open descriptor, even if the path was replaced.
        # Linux, or else macOS and BSD.
        name = f"/proc/self/fd/{descriptor}" if os.path.isdir("/proc/self/fd") else f"/dev/fd/{descriptor}"
        return Mapping(torch.from_file(name, shared=False, size=num_bytes, dtype=torch.uint8), -1)
    # -1: the mapping has no guard.
    guard = ctypes.c_int(-1)
    # The kernel reports a failure as a null address.
    address = _library.meshrec_map(descriptor, num_bytes, ctypes.byref(guard))
    if not address:
        raise OSError(f"{num_bytes:,} bytes of a file cannot be mapped into memory")
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    # Tensors hold a reference to `memory`. The finalizer unmaps after the last tensor is gone. At exit it
    # does not run, because other finalizers may still read the pages.
    weakref.finalize(memory, _library.meshrec_unmap, address, num_bytes, guard.value).atexit = False
    return Mapping(torch.frombuffer(memory, dtype=torch.uint8), guard.value)


def expect_misses(mapping: Mapping) -> None:
    """Prepare for a file larger than memory, for which most reads miss the page cache.

    Turns off the operating system's readahead (``MADV_RANDOM``). Table lookups then prefetch all their pages
    at once (``MADV_WILLNEED``). Does nothing if the compiled library is not available.
    """
    if _library is not None:
        _library.meshrec_expect_misses(mapping.guard)


def memory_limit() -> int:
    """Return the memory limit of this process in bytes: physical memory or, if lower, the cgroup limit."""
    # Both cgroup versions: memory.max is version 2, limit_in_bytes is version 1.
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            limit = min(limit, int(Path("/sys/fs/cgroup", name).read_text()))
    return limit


def lost_pages(mapping: Mapping) -> int:
    """Return how many pages were read as zeros because another process had truncated the file.

    Readers check it after a read. If it is above 0, the data may contain zeros instead of the file's bytes.
    """
    return 0 if _library is None else int(_library.meshrec_lost_pages(mapping.guard))
