"""Vectorized hashing: IDs to table rows, and IDs to random numbers."""

from typing import Any

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]

# Masks for the first 0 .. 8 bytes of a little-endian word.
_FIRST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], dtype=np.uint64)


def mix(values: UInt64s, seed: int = 0) -> UInt64s:
    """Return 64 pseudo-random bits per value; every seed gives a different permutation.

    The splitmix64 finalizer: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    mask = (1 << 64) - 1
    mixed = values + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def codes_of(column: Any) -> tuple[npt.NDArray[np.int64], Any]:
    """Return codes from 0 in order of first appearance, and the values by code, for an Arrow column."""
    column = column.combine_chunks()
    if hasattr(column, "dictionary_decode"):
        # A dictionary of the writer has another order, and values that no row has.
        column = column.dictionary_decode()
    encoded = column.dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary


def to_range(hashes: UInt64s, size: int) -> npt.NDArray[np.int64]:
    """Map hashes evenly to ``[0, size)``, for sizes up to 2**32: (upper half * size) >> 32."""
    scaled = hashes >> np.uint64(32)
    scaled *= np.uint64(size)
    scaled >>= np.uint64(32)
    return scaled.view(np.int64)


def hash_bytes(array: Any) -> tuple[npt.NDArray[np.int64], UInt64s]:
    """Return byte lengths and hashes for an Arrow string or binary array. Null hashes like the empty string.

    The loop processes 8 bytes of every string per iteration.
    """
    large = str(array.type).startswith("large")
    _, offset_buffer, data_buffer = array.buffers()
    first = array.offset
    offsets = np.frombuffer(offset_buffer, np.int64 if large else np.int32)[first : first + len(array) + 1]
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64)
    if array.null_count:
        lengths[array.is_null().to_numpy(zero_copy_only=False)] = 0
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    # Eight zero bytes at the end, so that the last window of a string stays inside the buffer.
    words = np.lib.stride_tricks.sliding_window_view(np.concatenate([data, np.zeros(8, np.uint8)]), 8)
    hashes = mix(lengths.astype(np.uint64))
    for start in range(0, int(lengths.max(initial=0)), 8):
        remaining = np.clip(lengths - start, 0, 8)
        word = words[np.where(remaining > 0, starts + start, 0)].view("<u8")[:, 0] & _FIRST_BYTES[remaining]
        hashes = np.where(remaining > 0, mix(hashes ^ word), hashes)
    return lengths, hashes
