from functools import partial

import numpy as np
import pytest

from meshrec.data import order_statistics as counted
from meshrec.data.order_statistics import order_statistics, quantile


def blocks_of(series):
    return zip(*(np.array_split(values, 3) for values in series), strict=True)


@pytest.mark.parametrize("bits", [1, 3, 16])
def test_blocks_give_the_values_of_sorted_series(monkeypatch, bits):
    monkeypatch.setattr(counted, "_BINS_LOG2", bits)
    random = np.random.default_rng(bits)
    for size, span in [(1, 1), (2, 2), (7, 3), (50, 10), (100, 2**31), (300, 2**40)]:
        series = [
            random.integers(-span, span, size),
            random.integers(0, span, 2 * size).astype(np.int32, casting="unsafe"),
        ]
        ranks = [[0, size // 2, size - 1], [size]]
        blocks = partial(blocks_of, series)
        assert order_statistics(blocks, ranks) == [
            np.sort(values)[of_series].tolist() for values, of_series in zip(series, ranks, strict=True)
        ]
        for share in (0.0, 0.3, 0.9, 1 - 0.1, 1.0):
            assert quantile(blocks, share) == [np.quantile(values, share) for values in series]


def test_the_quantile_of_an_empty_series_is_0():
    assert quantile(lambda: [(np.array([5, 7]), np.zeros(0, np.int64))], 0.5) == [6.0, 0.0]
