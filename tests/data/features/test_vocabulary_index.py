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
