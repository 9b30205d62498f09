"""CRC-32 of memory and of files: multi-threaded in the compiled library, with zlib as the fallback."""

import ctypes
import os
import zlib

from meshrec.ops.library import c_functions

# Below this size, the ctypes call costs more than hashing with zlib.
_SMALL = 1 << 12
_BUFFER = 1 << 18  # bytes per read, without the kernels


# None without the compiled library: both functions then use zlib.
_library = c_functions(
    crc32=(ctypes.c_uint32, [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t]),
    crc32_of_file=(ctypes.c_int64, [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint32]),
)


def crc32(content: memoryview | bytes, before: int = 0) -> int:
    """Return the CRC-32 of ``content``, equal to ``zlib.crc32(content, before)``.

    The compiled kernel hashes writable memory from 4 KiB on, with several threads. Smaller or read-only input
    goes to zlib, because ctypes cannot take the address of a read-only buffer.

    Args:
        before: CRC-32 of the bytes that precede ``content`` in the stream; 0: none.
    """
    # from_buffer shares the memory of the caller, without a copy.
    view = memoryview(content)
    if _library is None or view.readonly or view.nbytes < _SMALL:
        return zlib.crc32(view, before)
    memory = (ctypes.c_ubyte * view.nbytes).from_buffer(view)
    crc: int = _library.meshrec_crc32(before, ctypes.addressof(memory), view.nbytes)
    return crc


def crc32_of_file(descriptor: int, offset: int, length: int, before: int = 0) -> int | None:
    """Return the CRC-32 of a byte range in an open file, or None if the file ends before the range does.

    The compiled kernel runs without the GIL.

    Args:
        before: CRC-32 of the bytes that precede the range; 0: none.
    """
    if _library is not None:
        crc: int = _library.meshrec_crc32_of_file(descriptor, offset, length, before)
        return None if crc < 0 else crc
    # Without the kernels: read the range piece by piece.
    buffer = memoryview(bytearray(min(length, _BUFFER)))
    while length:
        count = os.preadv(descriptor, [buffer[: min(length, _BUFFER)]], offset)
        if count == 0:
            return None
        before = zlib.crc32(buffer[:count], before)
        offset, length = offset + count, length - count
    return before
