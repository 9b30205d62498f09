import numpy as np
import pytest

from meshrec.data import drifting_clicks, streaming
from meshrec.data.synthetic import Items
from meshrec.tables.hashed.keys import LRU, Hashed

SMALL = {"num_samples": 20_000, "num_test": 4096, "num_values": 50, "lifetime": 5000, "max_rows": 64}


def read(dataset):
    source = dataset.train._source
    return np.concatenate([source.block(block)[0].ids[0].values for block in range(len(source.block_sizes))])


def test_items_come_and_go():
    items = Items(lifetime=5000, seed=0)
    ids, times = np.arange(50)[None].repeat(4, 0), np.array([0, 2500, 5000, 10_000])
    raw = items.raw(ids, 0, times)
    same = [(raw[0] == each).mean() for each in raw]
    assert same[0] == 1
    assert 0.2 < same[1] < 0.8  # values change at moments of their own
    assert same[2] == same[3] == 0
    later = Items(lifetime=5000, seed=0, first=2500)
    assert np.array_equal(later.raw(ids, 0, times)[0], raw[1])
    assert not np.isin(items.raw(ids, 1, times), raw).any()


def test_ids_become_rows_in_three_ways(monkeypatch):
    monkeypatch.setattr(streaming, "MAX_CACHED_VALUES", 0)
    raw = read(drifting_clicks(**SMALL))
    assert len(np.unique(raw)) > 200
    keys = drifting_clicks(**SMALL)
    assert all(each.keys == Hashed(max_rows=64, evict=LRU()) for each in keys.features)
    for rows in ("hashing_trick", "vocabulary"):
        dataset = drifting_clicks(rows=rows, **SMALL)
        found = read(dataset)
        assert found.min() >= 0
        assert found.max() < 64
        assert [each.keys for each in dataset.features] == [None, None]
        labels = dataset.train._source.block(0)[0].labels
        assert np.array_equal(labels, keys.train._source.block(0)[0].labels)
    assert (found[:2000] > 0).mean() > 0.9  # the vocabulary knows the first, and hardly one of the last
    assert (found[-2000:] > 0).mean() < 0.1


def test_sizes_are_checked():
    with pytest.raises(ValueError, match=r"max_rows.*2"):
        drifting_clicks(max_rows=1)
    with pytest.raises(ValueError, match=r"lifetime.*1"):
        drifting_clicks(lifetime=0)
