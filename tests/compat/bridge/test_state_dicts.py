import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshrec.compat.bridge import quant, state_dicts
from meshrec.compat.bridge import sharding_plan as sp
from meshrec.compat.bridge.embeddings import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.compat.bridge.model_parallel import DistributedModelParallel
from meshrec.compat.bridge.plans import ShardingPlan
from meshrec.compat.bridge.sparse import KeyedJaggedTensor


class Model(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=6, embedding_dim=4, feature_names=[name])
            for name in ("rows", "whole", "copies")
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        self.over = nn.Linear(12, 1)

    def forward(self, features):
        return self.over(self.ebc(features).values())


def sharded(seed):
    torch.manual_seed(seed)
    model = Model()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    generators = {"rows": sp.row_wise(), "whole": sp.table_wise(rank=0), "copies": sp.data_parallel()}
    plan = sp.construct_module_sharding_plan(model.ebc, generators)
    return DistributedModelParallel(model, plan=ShardingPlan({"ebc": plan})), expected


def as_the_retrieval_example():
    """Gather the model on rank 0, then quantise and save it there alone."""
    dmp, expected = sharded(seed=0)
    cpu = torch.device("cpu")
    gathered = state_dicts.state_dict_to_device(dmp.state_dict(), pg=dist.group.WORLD, device=cpu)
    whole = Model("cpu" if dist.get_rank() == 0 else "meta")
    state_dicts.state_dict_gather(gathered, whole.state_dict())
    if dist.get_rank():
        return None
    assert all(torch.equal(value, expected[name]) for name, value in whole.state_dict().items())
    quantised = quant.quantize_embeddings(dmp, dtype=torch.qint8, inplace=True)
    file = io.BytesIO()
    torch.save(quantised.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for name in ("whole", "copies"):  # all of it is on this rank
        name = f"ebc.embedding_bags.{name}.weight"
        assert torch.equal(loaded[name], expected[name])
    return [part.shape[0] for part in loaded["ebc.embedding_bags.rows.weight"].local_shards()]


def test_rank_0_gathers_quantises_and_saves_alone(ranks):
    assert ranks(2).run(as_the_retrieval_example) == [[3], None]


def saved_and_loaded_by_rank():
    dmp, _ = sharded(seed=0)
    file = io.BytesIO()
    torch.save(dmp.state_dict(), file)
    file.seek(0)
    other, _ = sharded(seed=1)
    other.load_state_dict(torch.load(file, weights_only=True))
    features = KeyedJaggedTensor(
        ["rows", "whole", "copies"], torch.tensor([1, 2, 5]), lengths=torch.ones(3).int()
    )
    return bool(torch.equal(dmp(features), other(features)))


def test_what_ranks_saved_the_same_ranks_load(ranks):
    assert ranks(2).run(saved_and_loaded_by_rank) == [True, True]


def test_a_name_that_is_missing_is_named():
    with pytest.raises(ValueError, match="'b'"):
        state_dicts.state_dict_gather({"a": torch.ones(1)}, {"b": torch.ones(1)})
