"""Vectorized hashing: IDs to table rows, and IDs to random numbers."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from meshrec.ops.index import mix as mix_ids

UInt64s = npt.NDArray[np.uint64]

# Masks for the first 0 .. 8 bytes of a little-endian word.
_FIRST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], dtype=np.uint64)


def mix(values: UInt64s, seed: int = 0) -> UInt64s:
    """Hash 64-bit integers with splitmix64. For every seed, the hash is a permutation of all 64-bit integers.

    See Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (2014).

    Args:
        values: uint64 array of any shape.
        seed: selects one of the permutations.

    Returns:
        Hashes, uint64, with the same shape.
    """
    # A copy of a read-only array, because torch takes only arrays that may be written.
    flat = np.require(values, requirements=("C", "W")).reshape(-1).view(np.int64)
    mixed: UInt64s = mix_ids(torch.from_numpy(flat), seed).numpy().view(np.uint64).reshape(values.shape)
    return mixed


def codes_of(column: Any) -> tuple[npt.NDArray[np.int64], Any]:
    """Number the distinct values of an Arrow column from 0, ordered by first appearance.

    Example: the column ``["b", "a", "b"]`` gives the codes ``[0, 1, 0]`` and the values ``["b", "a"]``.

    Args:
        column: chunked array with n rows, without nulls.

    Returns:
        - The code per row, int64 [n].
        - The distinct values by code, an Arrow array.
    """
    column = column.combine_chunks()
    if hasattr(column, "dictionary_decode"):
        # A dictionary of the writer has another order, and values that no row has.
        column = column.dictionary_decode()
    encoded = column.dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary


def to_range(hashes: UInt64s, size: int) -> npt.NDArray[np.int64]:
    """Map 64-bit hashes evenly to integers in ``[0, size)``, int64 [n].

    The result is ``(upper 32 bits * size) >> 32``, so ``size`` must not exceed 2**32.
    """
    scaled = hashes >> np.uint64(32)
    scaled *= np.uint64(size)
    scaled >>= np.uint64(32)
    return scaled.view(np.int64)


def hash_bytes(array: Any) -> tuple[npt.NDArray[np.int64], UInt64s]:
    """Hash the strings in an Arrow string or binary array. Null has the hash of the empty string.

    Args:
        array: n strings.

    Returns:
        - The length per string in bytes, int64 [n].
        - The hash per string, uint64 [n].
    """
    large = str(array.type).startswith("large")
    _, offset_buffer, data_buffer = array.buffers()
    first = array.offset
    offsets = np.frombuffer(offset_buffer, np.int64 if large else np.int32)[first : first + len(array) + 1]
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64)
    if array.null_count:
        lengths[array.is_null().to_numpy(zero_copy_only=False)] = 0
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    if len(array):
        # A slice shares the buffer of the whole array, which would be copied below.
        data, starts = data[offsets[0] : offsets[-1]], starts - offsets[0]
    # Eight zero bytes at the end, so the last window of a string stays inside the buffer.
    words = np.lib.stride_tricks.sliding_window_view(np.concatenate([data, np.zeros(8, np.uint8)]), 8)
    hashes = mix(lengths.astype(np.uint64))
    # An iteration hashes the next 8 bytes of all strings at once.
    for start in range(0, int(lengths.max(initial=0)), 8):
        remaining = np.clip(lengths - start, 0, 8)
        word = words[np.where(remaining > 0, starts + start, 0)].view("<u8")[:, 0] & _FIRST_BYTES[remaining]
        # Strings that have ended keep their hash.
        hashes = np.where(remaining > 0, mix(hashes ^ word), hashes)
    return lengths, hashes
