import pytest
import torch
from torch import nn

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.optim import SGD
from meshrec.testing import RankError, assert_equal_to_unsharded
from meshrec.testing.equality import compare


class Model(nn.Module):
    seeds = iter(range(100))

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.ebc = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="t0", num_embeddings=5, embedding_dim=4, feature_names=["a"])]
        )

    def forward(self, features):
        return self.ebc(features).values()


def check(same):
    env = default_env()
    plan = md.construct_module_sharding_plan(Model(0).ebc, {"t0": md.row_wise()}, world_size=env.shard.size)
    batch = KeyedJaggedTensor(["a"], torch.tensor([1, 4]), lengths=torch.tensor([1, 1]))
    assert_equal_to_unsharded(
        lambda: Model(0 if same else next(Model.seeds)),
        md.ShardingPlan({"ebc": plan}),
        [[(batch,)] * env.world.size] * 2,
        loss=lambda values: values.square().sum(),
        sharders=[md.EmbeddingBagCollectionSharder(SGD(lr=0.1))],
        env=env,
    )


def test_equal_models_pass(ranks):
    ranks(2).run(check, True)


def test_a_difference_is_found(ranks):
    with pytest.raises(RankError, match=r"step 0.*1.*1 values"):
        ranks(2).run(check, False)


def test_compare():
    with pytest.raises(AssertionError, match=r"x.*\[2\].*\[3\]"):
        compare(torch.zeros(2), torch.zeros(3), "x", 0, 0)
    with pytest.raises(AssertionError, match=r"1.*2 values.*1"):
        compare(torch.tensor([0.0, 1.0]), torch.zeros(2), "x", 0, 0)
