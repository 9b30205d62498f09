import numpy as np
import pytest

from meshrec.data.shares import cut_rows, row_ranges


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("share", [None, 0.3, 0.0])
def test_every_row_is_in_one_range(num_ranks, share):
    sizes = np.array([5000, 0, 1, 12_000, 7])
    num = int(sizes.sum())
    selected = None if share is None else np.arange(num) < share * num
    cuts = cut_rows(num, num_ranks, selected)
    assert len(cuts) == num_ranks + 1
    starts = np.cumsum(sizes) - sizes
    rows = []
    for rank in range(num_ranks):
        for block, start, stop, first_row in row_ranges(sizes, *cuts[rank : rank + 2]):
            assert 0 <= start <= stop <= sizes[block]
            assert first_row == starts[block] + start
            rows += range(first_row, first_row + stop - start)
    assert rows == list(range(num))


def test_a_single_rank_has_a_range_per_block():
    assert [rows.block for rows in row_ranges(np.array([2, 0, 3]))] == [0, 1, 2]


def test_ranks_take_equal_shares_of_the_work():
    selected = np.arange(100_000) < 50_000
    first, cut, last = cut_rows(100_000, 2, selected)
    work = [(stop - start) + 4 * selected[start:stop].sum() for start, stop in ((first, cut), (cut, last))]
    assert work[0] == pytest.approx(work[1], rel=0.05)
    assert cut_rows(10, 4) == [0, 2, 5, 7, 10]
    assert cut_rows(0, 2, np.zeros(0, np.bool_)) == [0, 0, 0]
