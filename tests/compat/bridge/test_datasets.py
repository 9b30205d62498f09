import itertools

import pytest
import torch

from meshrec.compat.bridge import datasets
from meshrec.compat.bridge.datasets import Batch, RandomRecDataset


def dataset(**given):
    return RandomRecDataset(
        **{"keys": ["a", "b"], "batch_size": 4, "manual_seed": 0, "num_dense": 3, **given}
    )


def test_batches_have_what_is_asked_for():
    batch = next(iter(dataset(hash_sizes=[2, 5], ids_per_features=[1, 3], min_ids_per_features=[0, 2])))
    bags = batch.sparse_features.to_dict()
    assert batch.dense_features.shape == (4, 3)
    assert batch.labels.shape == (4,)
    assert bags["a"].lengths().max() <= 1
    assert 2 <= bags["b"].lengths().min() <= bags["b"].lengths().max() <= 3
    assert bags["a"].values().max() < 2
    assert bags["b"].values().max() < 5


def test_a_seed_gives_the_same_batches_again():
    one, other = (next(iter(dataset())) for _ in range(2))
    assert torch.equal(one.dense_features, other.dense_features)
    assert torch.equal(one.sparse_features.values(), other.sparse_features.values())


def test_generated_batches_repeat():
    batches = list(dataset(num_batches=5, num_generated_batches=2))
    assert len(batches) == len(dataset(num_batches=5)) == 5
    assert batches[0] is batches[2] is batches[4]
    fresh = list(itertools.islice(dataset(num_generated_batches=-1), 3))
    assert len({id(batch) for batch in fresh}) == 3


def test_batches_move():
    batch = next(iter(dataset()))
    moved = batch.to(torch.device("meta"), non_blocking=True)
    assert isinstance(moved, Batch)
    assert moved.labels.device.type == moved.sparse_features.values().device.type == "meta"


def test_wrong_numbers():
    with pytest.raises(ValueError, match=r"hash_sizes.*2 keys.*\[3\]"):
        dataset(hash_sizes=[3])
    with pytest.raises(TypeError, match="end"):
        len(dataset())


def test_one_name_for_each_column():
    assert len(datasets.DEFAULT_COLUMN_NAMES) == len(set(datasets.DEFAULT_COLUMN_NAMES)) == 1 + 13 + 26
    assert datasets.DEFAULT_CAT_NAMES[-1] == "cat_25"
