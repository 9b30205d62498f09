"""Sorted IDs packed for their way between nodes, against plain torch."""

import random

import pytest
import torch

from meshrec.ops import operators
from meshrec.ops.dist import ids_naive as naive

OPS = operators
KERNELS = pytest.mark.parametrize("ops", [OPS, naive])


def drawn_runs(seed):
    """Runs of many lengths, dense and sparse, with the greatest IDs of both types."""
    draw = random.Random(seed)
    wide = seed % 2 == 1
    runs = []
    for length in draw.choices([0, 1, 5, 127, 128, 129, 400], k=6):
        spread = draw.choice([length, 3 * length, 1 << 20, 1 << 31, (1 << 62) if wide else 1 << 31])
        spread = max(spread, length)
        runs.append(sorted(draw.sample(range(spread), length)))
    runs.append([0, (1 << 63) - 1 if wide else (1 << 31) - 1])
    ids = torch.tensor([each for run in runs for each in run], dtype=torch.int64 if wide else torch.int32)
    return ids, [len(run) for run in runs], wide


def test_messages_equal_naive_and_come_back():
    for seed in range(20):
        ids, counts, wide = drawn_runs(seed)
        message, sizes = OPS.pack_ids(ids, counts)
        expected, expected_sizes = naive.pack_ids(ids, counts)
        assert torch.equal(message, expected), seed
        assert torch.equal(sizes, expected_sizes)
        assert int(sizes.sum()) == len(message)
        for ops in (OPS, naive):
            found = ops.unpack_sorted_ids(message, counts, wide)
            assert found.dtype == ids.dtype
            assert torch.equal(found, ids), seed


def test_distinct_ids_equal_those_of_torch():
    for seed, num_rows in enumerate((1, 63, 64, 65, 5000)):
        ids = torch.randint(0, num_rows, (700,), generator=torch.Generator().manual_seed(seed))
        for each in (ids, ids[:0]):
            for ops in (OPS, naive):
                found = ops.distinct_ids(each, num_rows)
                assert all(map(torch.equal, found, torch.unique(each, return_inverse=True)))
    with pytest.raises(ValueError, match=r"id 5.*\[0.*5"):
        OPS.distinct_ids(torch.tensor([5]), 5)


def test_neighbours_need_no_bits():
    message, _ = OPS.pack_ids(torch.arange(1000), [1000])
    assert len(message) == 8  # a width for each group


@KERNELS
@pytest.mark.parametrize("ids", [[3, 3], [5, 4], [-1, 2]])
def test_runs_that_do_not_ascend_are_told(ops, ids):
    with pytest.raises(ValueError, match=r"ids.*0"):
        ops.pack_ids(torch.tensor(ids), [2])


@KERNELS
def test_messages_that_do_not_fit_are_told(ops):
    message, _ = ops.pack_ids(torch.tensor([5, 900, 10_000]), [3])
    for wrong in (message[:-1], torch.cat([message, message[:1]]), message[:0]):
        with pytest.raises(ValueError, match="hold 3"):
            ops.unpack_sorted_ids(wrong, [3], False)
    with pytest.raises(ValueError, match=r"4 ids.*3"):
        ops.pack_ids(torch.arange(3), [4])


def test_opcheck():
    utilities = ("test_schema", "test_faketensor")
    ids = torch.tensor([1, 5, 9])
    torch.library.opcheck(torch.ops.meshrec.distinct_ids.default, (ids, 10), test_utils=utilities)
    torch.library.opcheck(torch.ops.meshrec.pack_ids.default, (ids, [2, 1]), test_utils=utilities)
    message, _ = OPS.pack_ids(ids, [2, 1])
    torch.library.opcheck(
        torch.ops.meshrec.unpack_sorted_ids.default, (message, [2, 1], True), test_utils=utilities
    )
