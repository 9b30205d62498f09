"""CRC-32 with several threads: the compiled kernel, or zlib if nothing was compiled."""

import ctypes
import os
import zlib

from meshrec.ops.library import c_entry_points

_SMALL = 1 << 12
_BUFFER = 1 << 18


def _kernels() -> ctypes.CDLL | None:
    library = c_entry_points()
    if library is None or not hasattr(library, "meshrec_crc32_of_file"):
        return None
    library.meshrec_crc32.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t]
    library.meshrec_crc32.restype = ctypes.c_uint32
    library.meshrec_crc32_of_file.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint32]
    library.meshrec_crc32_of_file.restype = ctypes.c_int64
    return library


_library = _kernels()


def crc32(content: memoryview | bytes, before: int = 0) -> int:
    """Return the checksum that ``zlib.crc32`` computes.

    Large writable memory goes through the kernel, which needs its address; the rest goes through zlib.

    Args:
        content: the bytes.
        before: the CRC-32 of the bytes before them.
    """
    view = memoryview(content)
    if _library is None or view.readonly or view.nbytes < _SMALL:
        return zlib.crc32(view, before)
    memory = (ctypes.c_ubyte * view.nbytes).from_buffer(view)
    found: int = _library.meshrec_crc32(before, ctypes.addressof(memory), view.nbytes)
    return found


def crc32_of_file(descriptor: int, offset: int, length: int, before: int = 0) -> int | None:
    """Return the CRC-32 of a part of an open file; None if the file ends before the part does.

    Other threads run meanwhile.

    Args:
        descriptor: an open file that can be read at any position.
        offset: the first byte of the part.
        length: the number of bytes.
        before: the CRC-32 of the bytes before the part.
    """
    if _library is not None:
        found: int = _library.meshrec_crc32_of_file(descriptor, offset, length, before)
        return None if found < 0 else found
    buffer = memoryview(bytearray(min(length, _BUFFER)))
    while length:
        count = os.preadv(descriptor, [buffer[: min(length, _BUFFER)]], offset)
        if count == 0:
            return None
        before = zlib.crc32(buffer[:count], before)
        offset, length = offset + count, length - count
    return before
