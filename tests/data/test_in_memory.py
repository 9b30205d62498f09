import itertools

import numpy as np
import pytest

from meshrec.data import InMemoryReader, Position, Ranges

from .streams import covered, epoch, numbers


def reader(num=20, **options):
    rows = np.arange(num)
    some = Ranges(np.repeat(rows, 2), 2 * rows, rows % 3)
    ids = {"one": Ranges(rows, rows, np.ones(num, np.int64)), "some": some}
    dense, labels = rows[:, None].astype(np.float32), (rows % 2).astype(np.float32)
    return InMemoryReader(dense, labels, ids, **({"seed": 0} | options))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_resuming_on_any_number_of_ranks(world_size):
    whole = covered(epoch(reader(), 6))
    resumed = covered(epoch(reader(), 6 // world_size, world_size, Position(0, 6)))
    assert resumed == whole[1:]
    assert sorted(itertools.chain.from_iterable(whole)) == list(range(20))
    assert covered(epoch(reader(), 6, position=Position(1, 0))) != whole


def test_order_may_be_kept():
    assert [numbers(batch) for batch in reader(shuffle=False).batches(16)] == [
        list(range(16)),
        list(range(16, 20)),
    ]


def test_wrong_arrays():
    with pytest.raises(ValueError, match=r"'labels'.*2"):
        InMemoryReader(np.zeros((3, 1), np.float32), np.zeros(2, np.float32), {}, seed=0)
    with pytest.raises(ValueError, match="arrays"):
        InMemoryReader(np.zeros((0, 1), np.float32), np.zeros(0, np.float32), {}, seed=0)
