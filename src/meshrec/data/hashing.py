"""Hashing of whole arrays: ids into tables, and numbers out of ids."""

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]


def mix(values: UInt64s, seed: int = 0) -> UInt64s:
    """64 bits that look random, another permutation for each seed.

    The finalizer of splitmix64: Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (2014).
    """
    mask = (1 << 64) - 1
    mixed = values + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def to_range(hashes: UInt64s, size: int) -> npt.NDArray[np.int64]:
    """Hashes to ``[0, size)``, evenly, for sizes up to 2**32: the upper half times the size, shifted down."""
    scaled = hashes >> np.uint64(32)
    scaled *= np.uint64(size)
    scaled >>= np.uint64(32)
    return scaled.view(np.int64)
