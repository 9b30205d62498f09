import torch

from meshrec import KeyedJaggedTensor
from meshrec.data import Batch


def test_a_batch_moves_as_a_whole():
    sparse = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
    batch = Batch(torch.rand(2, 3), sparse, torch.tensor([0.0, 1.0]))
    assert len(batch) == 2
    assert batch.dense_features is batch.dense
    assert batch.sparse_features is sparse
    moved = batch.to(torch.device("meta"))
    assert {moved.dense.device.type, moved.sparse.device().type, moved.labels.device.type} == {"meta"}
