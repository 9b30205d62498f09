from dataclasses import replace

import pytest
import torch

from meshrec.data import Batch
from meshrec.sparse import KeyedJaggedTensor
from meshrec.train.baselines import baselines
from meshrec.train.trees import TreeBaseline, has_trees

pytestmark = pytest.mark.skipif(not has_trees(), reason="LightGBM is not installed")


def test_trees_find_what_a_line_cannot(small):
    """A teacher with crosses: the trees beat logistic regression, or come close, and all rows are judged."""
    dataset = replace(small().data, num_samples=4000, num_validation=4000).load()
    found = {each.name: each.quality for each in baselines(dataset)}
    assert set(found["LightGBM"]) == {"validation", "test"}
    assert found["LightGBM"]["test"]["auc"] > 0.55


def test_columns_are_values_categories_and_what_lists_hold(small):
    dataset = replace(small().data, num_samples=500, num_validation=500).load()
    (batch,) = dataset.train.batches(500)
    keys = batch.sparse.keys()
    lengths = torch.ones(len(keys), 3, dtype=torch.int64)
    lengths[0] = torch.tensor([2, 0, 1])
    lengths[1, 1] = 0
    values = torch.arange(int(lengths.sum())) % 5
    tiny = Batch(
        torch.rand(3, batch.dense.shape[1]),
        KeyedJaggedTensor(keys, values, lengths=lengths.flatten()),
        torch.tensor([0.0, 1.0, 1.0]),
    )
    trees = TreeBaseline.__new__(TreeBaseline)
    trees._rows = {each.name: each.num_embeddings for each in dataset.features}
    trees._lists = {keys[0]: torch.tensor([1, 2])}
    trees._frequent = {}
    found = torch.from_numpy(trees.matrix(tiny))
    num = tiny.dense.shape[1]
    assert torch.equal(found[:, :num], tiny.dense)
    second = found[:, num]
    assert second.isnan().tolist() == [False, True, False]
    assert found[:, -2:].tolist() == [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
