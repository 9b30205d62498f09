import numpy as np

from meshrec.data.samples import (
    IdTable,
    PermutedSamples,
    Ragged,
    Samples,
    Shape,
    concatenated,
    gather_ranges,
    to_batch,
    void_samples,
)


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
    pieces = [PermutedSamples(piece) for piece in (good, holes, void_samples(4, Shape(0, 2)))]
    ranges = [valid for piece in pieces for valid in piece.ranges(0, piece.num)]
    batch = to_batch(("a", "b"), Shape(0, 2), ranges)
    batch.sparse.validate()
    assert batch.labels.tolist() == [0, 1, 2, 1]
    assert batch.sparse["a"].lengths().tolist() == [0, 1, 2, 1]
    assert batch.sparse["a"].values().tolist() == [10, 11, 12, 10]
    assert batch.sparse["b"].values().tolist() == [0, 1, 2, 1]
    assert batch.sparse.length_per_key() == [4, 4]


def test_a_batch_may_be_empty():
    batch = to_batch(("a",), Shape(2, 1), [])
    assert (len(batch), batch.dense.shape, batch.sparse.stride()) == (0, (0, 2), 0)


def test_invalid_samples_keep_their_positions_in_the_order():
    holes = PermutedSamples(samples(5, np.array([True, False, True, True, False])), np.array([4, 3, 1, 2, 0]))
    assert [(start, stop) for _, start, stop in holes.ranges(0, 5)] == [(1, 2), (3, 5)]
    assert [(start, stop) for _, start, stop in holes.ranges(1, 4)] == [(1, 2), (3, 4)]
    assert to_batch(("a", "b"), Shape(0, 2), holes.ranges(0, 4)).labels.tolist() == [3, 2]


def test_codes_have_the_ids_of_their_table():
    table, other = IdTable(np.array([5, 6, 7]), 10), IdTable(np.array([8, 9]))
    codes = np.array([11, 9, -(2**63), 10, 2**63 - 1])
    assert table.of(codes).tolist() == [6, 7, 7, 5, 7]
    read_only = np.array([0, 1, 1, 0, 0], np.int32)
    read_only.flags.writeable = False
    offsets = np.array([0, 2, 5])
    first = Samples(
        np.zeros((2, 0), np.float32), np.zeros(2, np.float32), (Ragged(codes, offsets, None, table),)
    )
    second = first._replace(ids=(Ragged(read_only, offsets, None, other),))
    for piece, expected in ((first, [7, 5, 7, 6, 7]), (second, [9, 8, 8, 8, 9])):
        batch = to_batch(("a",), Shape(0, 1), PermutedSamples(piece, np.array([1, 0])).ranges(0, 2))
        assert batch.sparse.values().tolist() == expected
    assert rows(concatenated([first.part(1, 2), second]).ids[0]) == [[7, 5, 7], [8, 9], [9, 8, 8]]
    assert rows(first.take(np.array([1, 0])).ids[0]) == [[7, 5, 7], [6, 7]]
