import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.optim import Adagrad, RowWiseAdagrad
from meshrec.tables.optimizer import distinct_rules
from meshrec.tables.updates import slot_major, update_rows
from meshrec.testing import assert_equal_to_unsharded


def test_update_rows_steps_only_them():
    weight, state = torch.ones(4, 2), [torch.zeros(4, 2)]
    spec = Adagrad(lr=0.5, eps=1e-10)
    hyper = spec.hyper(lr=0.5, step=1)
    update_rows(
        weight, state, torch.tensor([1, 3]), torch.full((2, 2), 2.0), optimizer=spec.code, hyper=hyper
    )
    torch.testing.assert_close(weight, torch.tensor([[1.0, 1.0], [0.5, 0.5], [1.0, 1.0], [0.5, 0.5]]))
    assert state[0][:, 0].tolist() == [0.0, 4.0, 0.0, 4.0]


def test_order_of_slots_and_rules():
    a, b, c, d = (torch.zeros(n) for n in range(4))
    assert [slot.numel() for slot in slot_major([[a, b], [c, d]])] == [0, 2, 1, 3]
    first, second = object(), object()
    assert distinct_rules([None, first, second, first]) == [first, second]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
        self.ebc = EmbeddingBagCollection([table])

    def forward(self, features):
        return self.ebc(features).values()


def learn_in_columns_elsewhere():
    """A table in columns on ranks 0 and 2: the others hold nothing."""
    env = default_env()

    builders = {"t": md.column_wise(ranks=[0, 2])}
    plan = md.construct_module_sharding_plan(Model().ebc, builders, world_size=env.shard.size)
    batch = KeyedJaggedTensor(["f"], torch.tensor([1, 5, 8]), lengths=torch.tensor([2, 1]))
    batches = [[(batch,)] * env.world.size] * 2
    assert_equal_to_unsharded(
        Model,
        md.ShardingPlan({"ebc": plan}),
        batches,
        loss=lambda pooled: pooled.square().sum(),
        sharders=[md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1))],
        dense=None,
    )


def test_ranks_without_a_table_agree_on_row_statistics_of_others(ranks):
    ranks(4).run(learn_in_columns_elsewhere)
