from dataclasses import replace

import pytest
import torch

from meshrec.train import DeepFMConfig, DLRMConfig, DLRMDCNConfig, join
from meshrec.train.building import build


@pytest.mark.parametrize(
    "config", [kind(embedding_dim=4) for kind in (DLRMConfig, DLRMDCNConfig, DeepFMConfig)]
)
def test_models_fit_the_dataset(config, small):
    dataset = small().data.load()
    model = config.build(dataset)
    tables = [parameter for parameter in model.parameters() if parameter.is_meta]
    assert [list(table.shape) for table in tables] == [[50, 4]] * 3
    (batch, *_) = dataset.train.batches(10)
    model.sparse_arch.embedding_bag_collection.to_empty(device=torch.device("cpu"))
    assert model(batch.dense, batch.sparse).shape == (10, 1)


def test_first_values_are_as_wide_as_asked(small):
    recipe = replace(small(), model=DLRMConfig(embedding_dim=64, table_std=0.5))
    built = build(recipe, recipe.data.load(), join("cpu"))
    (table, *_) = (value for name, value in built.model.state_dict().items() if "embedding_bags" in name)
    assert table.std().item() == pytest.approx(0.5, rel=0.05)
