import pickle

import numpy as np
import pyarrow as pa
import pytest

from meshrec.data import DataError
from meshrec.data.features import Vocabulary, vocabulary_index
from meshrec.data.features.values import hashes_of
from meshrec.data.features.vocabulary_index import VocabularyIndex

NUM = 150_000  # of several blocks, the last of which is not full


@pytest.mark.parametrize(
    "values",
    [
        pa.array(np.random.default_rng(0).permutation(3 * NUM)[:NUM] - NUM),
        pa.array([f"value-{n * n}" for n in range(NUM)]),
        pa.array([f"value-{n * n}" for n in range(NUM + 7)], pa.large_string()).slice(7),
        pa.array(np.random.default_rng(0).permutation(NUM) / 7),
    ],
    ids=["integers", "strings", "a slice", "floats"],
)
def test_every_value_is_found_at_its_position(values):
    index = VocabularyIndex("v", values)
    rng = np.random.default_rng(1)
    positions = rng.integers(0, NUM, 5000)
    np.testing.assert_array_equal(index.find(hashes_of(values.take(pa.array(positions)))), positions)
    np.testing.assert_array_equal(index.find(hashes_of(values)), np.arange(NUM))
    unseen = index.find(rng.integers(0, 2**63, 5000).astype(np.uint64))
    assert (unseen == -1).all()
    assert index.find(np.zeros(0, np.uint64)).tolist() == []


def test_an_empty_vocabulary_has_no_value():
    assert (
        VocabularyIndex("v", pa.array([], pa.string())).find(np.arange(3, dtype=np.uint64)).tolist()
        == [-1] * 3
    )


@pytest.mark.parametrize("twin", [5, NUM - 1])
def test_two_values_with_one_hash_are_refused(monkeypatch, twin):
    def colliding(array):
        integers = array.to_numpy().astype(np.uint64)
        return np.where(integers == twin, np.uint64(3), integers)

    monkeypatch.setattr(vocabulary_index, "hashes_of", colliding)
    with pytest.raises(DataError, match="'v': two values"):
        VocabularyIndex("v", pa.array(np.arange(NUM)))


def test_a_vocabulary_that_was_looked_up_has_a_pickle():
    feature = Vocabulary(name="v", found="text", vocabulary=["b", "a"])
    array = pa.array(["a", "c", "b", None])
    rows = feature.rows_of(array).tolist()
    assert rows == [3, 1, 2, 0]
    assert pickle.loads(pickle.dumps(feature)).rows_of(array).tolist() == rows
    hashes = hashes_of(array)
    hashes.flags.writeable = False
    assert feature.lookup(hashes).tolist() == [3, -1, 2, -1]


@pytest.mark.parametrize("num_unseen", [1, 3])
@pytest.mark.parametrize("lowest", [-(2**63), -3, 0, 2**63 - 40])
def test_dense_and_sparse_integers_have_the_same_rows(lowest, num_unseen):
    rng = np.random.default_rng(0)
    values = pa.array(lowest + rng.permutation(40)[:25])
    dense, sparse = (
        Vocabulary(name="v", found="integer", vocabulary=values, num_unseen=num_unseen) for _ in range(2)
    )
    sparse.__dict__["_integer_rows"] = None  # as for a vocabulary with gaps
    edges = [-(2**63), 2**63 - 1, 0, -1, None]
    array = pa.array([*edges, *(lowest + rng.integers(0, 40, 50)).tolist()])
    assert dense.__dict__.get("_integer_rows") is None
    assert dense.rows_of(array).tolist() == sparse.rows_of(array).tolist()
    assert dense.__dict__["_integer_rows"] is not None
    assert dense.lookup_values(array).tolist() == sparse.lookup_values(array).tolist()
    codes, table = dense.codes_of(array.drop_null())
    rows = sparse.rows_of(array.drop_null()).tolist()
    assert (codes if table is None else table.of(codes)).tolist() == rows
    assert (table is None) == (num_unseen > 1)


def test_equal_values_are_refused_as_without_a_table():
    feature = Vocabulary(name="v", found="integer", vocabulary=pa.array([3, 4, 3]))
    with pytest.raises(DataError, match="'v': two values"):
        feature.rows_of(pa.array([3]))


def test_dictionaries_are_looked_up_by_their_values():
    feature = Vocabulary(name="v", found="text", vocabulary=["b", "a"])
    for values in (["a", "b", "c"], ["b", "a", ""], ["c", "c2", "a"]):
        array = pa.array(values * 2).dictionary_encode()
        codes, table = feature.codes_of(array)
        assert table.of(codes).tolist() == feature.rows_of(pa.array(values * 2)).tolist()
