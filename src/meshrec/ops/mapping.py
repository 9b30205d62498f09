"""Files mapped into memory that may be cut short meanwhile without ending the process."""

import contextlib
import ctypes
import os
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops.library import c_entry_points


def _kernels() -> ctypes.CDLL | None:
    library = c_entry_points()
    if library is None or not hasattr(library, "meshrec_map"):
        return None
    library.meshrec_map.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int)]
    library.meshrec_map.restype = ctypes.c_void_p
    library.meshrec_lost_pages.argtypes = [ctypes.c_int]
    library.meshrec_lost_pages.restype = ctypes.c_uint64
    library.meshrec_unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.meshrec_unmap.restype = None
    library.meshrec_expect_misses.argtypes = [ctypes.c_int]
    library.meshrec_expect_misses.restype = None
    return library


_library = _kernels()


class Mapping(NamedTuple):
    """A file in memory.

    Attributes:
        content: its bytes [num_bytes], uint8. A page that is written to becomes this process's own; the file
            never changes.
        guard: the number under which `lost_pages` counts pages of this mapping; -1 without the kernels.
    """

    content: Tensor
    guard: int


def map_file(descriptor: int, num_bytes: int) -> Mapping:
    """Map the first bytes of an open file into memory.

    If the file is cut short later, reading behind its end gives zeros, which `lost_pages` counts. Without
    the kernels, such a read ends the process (SIGBUS).

    Args:
        descriptor: the file; it may be closed afterwards.
        num_bytes: how many bytes to map, at least 1.

    Raises:
        OSError: the system cannot map the file.
    """
    if _library is None:
        # torch opens the file by its name; this one leads to the open file.
        name = f"/proc/self/fd/{descriptor}" if os.path.isdir("/proc/self/fd") else f"/dev/fd/{descriptor}"
        return Mapping(torch.from_file(name, shared=False, size=num_bytes, dtype=torch.uint8), -1)
    guard = ctypes.c_int(-1)
    ctypes.set_errno(0)
    address = _library.meshrec_map(descriptor, num_bytes, ctypes.byref(guard))
    if not address:
        raise OSError(f"{num_bytes:,} bytes of a file cannot be mapped into memory")
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    # The tensors that look at the memory keep it; it is unmapped after the last of them.
    weakref.finalize(memory, _library.meshrec_unmap, address, num_bytes, guard.value).atexit = False
    return Mapping(torch.frombuffer(memory, dtype=torch.uint8), guard.value)


def expect_misses(mapping: Mapping) -> None:
    """Prepare for a mapping that holds more than memory does.

    The system then reads single pages of it, and lookups request all pages of a batch before they read the
    first. Without the kernels nothing happens: pages come one after the other.
    """
    if _library is not None:
        _library.meshrec_expect_misses(mapping.guard)


def memory_limit() -> int:
    """Return the bytes of memory that this process may use: the machine's, or those of its control group."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            found = min(found, int(Path("/sys/fs/cgroup", name).read_text()))
    return found


def lost_pages(mapping: Mapping) -> int:
    """Return how many pages of a mapping were read after the file no longer had them."""
    return 0 if _library is None else int(_library.meshrec_lost_pages(mapping.guard))
