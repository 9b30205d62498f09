import pytest
import torch

from meshrec.train import DLRMConfig, DLRMDCNConfig


@pytest.mark.parametrize("config", [DLRMConfig(embedding_dim=4), DLRMDCNConfig(embedding_dim=4)])
def test_models_fit_the_dataset(config, small):
    dataset = small().data.load()
    model = config.build(dataset)
    tables = [parameter for parameter in model.parameters() if parameter.is_meta]
    assert [list(table.shape) for table in tables] == [[50, 4]] * 3
    (batch, *_) = dataset.train.batches(10)
    model.sparse_arch.embedding_bag_collection.to_empty(device=torch.device("cpu"))
    assert model(batch.dense, batch.sparse).shape == (10, 1)
