import numpy as np

from meshrec.data.samples import Ragged, Samples, Shape, gather_ranges, to_batch, void_samples


def samples(num, kept=None):
    lengths = np.arange(num) % 3
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ragged = Ragged(np.arange(offsets[-1]) + 10, offsets)
    plain = Ragged(np.arange(num), np.arange(num + 1))
    return Samples(np.zeros((num, 0), np.float32), np.arange(num, dtype=np.float32), (ragged, plain), kept)


def rows(ragged):
    return [ragged.values[a:b].tolist() for a, b in zip(ragged.offsets, ragged.offsets[1:], strict=False)]


def test_taking_samples_takes_their_ids():
    taken = samples(5).part(1, 5).take(np.array([3, 0, 1]))
    assert rows(taken.ids[0]) == [[13], [10], [11, 12]]
    assert rows(taken.ids[1]) == [[4], [1], [2]]
    assert taken.labels.tolist() == [4, 1, 2]


def test_ranges_may_overlap_and_be_equally_long():
    values = np.arange(10)
    assert rows(gather_ranges(values, np.array([3, 2]), np.array([2, 2]))) == [[3, 4], [2, 3]]
    assert rows(gather_ranges(values, np.array([3, 0]), np.array([0, 4]))) == [[], [0, 1, 2, 3]]
    assert rows(gather_ranges(values, np.zeros(0, np.int64), np.zeros(0, np.int64))) == []


def test_batches_leave_out_what_is_not_kept():
    good = samples(3)
    holes = samples(3, np.array([False, True, False]))
    batch = to_batch(("a", "b"), Shape(0, 2), [good, holes, void_samples(4, Shape(0, 2))])
    batch.sparse.validate()
    assert batch.labels.tolist() == [0, 1, 2, 1]
    assert batch.sparse["a"].lengths().tolist() == [0, 1, 2, 1]
    assert batch.sparse["a"].values().tolist() == [10, 11, 12, 10]
    assert batch.sparse["b"].values().tolist() == [0, 1, 2, 1]
    assert batch.sparse.length_per_key() == [4, 4]


def test_a_batch_may_be_empty():
    batch = to_batch(("a",), Shape(2, 1), [])
    assert (len(batch), batch.dense.shape, batch.sparse.stride()) == (0, (0, 2), 0)
