import numpy as np
import pyarrow as pa

from meshrec.data.hashing import hash_bytes, mix, to_range


def test_splitmix64():
    # The first outputs of the generator that is seeded with 0: it mixes multiples of the golden ratio.
    golden = np.uint64(0x9E3779B97F4A7C15)
    assert mix(np.arange(2, dtype=np.uint64) * golden).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_hashes_are_even_over_a_table():
    ids = to_range(mix(np.arange(100_000, dtype=np.uint64)), 10)
    assert ids.dtype == np.int64
    counts = np.bincount(ids, minlength=10)
    assert len(counts) == 10
    assert abs(counts - 10_000).max() < 500
    assert not np.array_equal(ids, to_range(mix(np.arange(100_000, dtype=np.uint64), seed=1), 10))
    assert to_range(np.array([2**64 - 1], np.uint64), 2**32).tolist() == [2**32 - 1]


def test_a_slice_of_strings_hashes_like_the_whole_array():
    for kind in (pa.string(), pa.large_string()):
        strings = pa.array(["", "a", None, "a longer text of several words", "b" * 40, "c"], kind)
        lengths, hashes = hash_bytes(strings)
        for start, size in ((0, 3), (1, 4), (5, 1), (2, 0)):
            sliced_lengths, sliced = hash_bytes(strings.slice(start, size))
            assert sliced_lengths.tolist() == lengths[start : start + size].tolist()
            assert sliced.tolist() == hashes[start : start + size].tolist()
