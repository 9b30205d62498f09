import pytest
import torch

from meshrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from meshrec import distributed as md
from meshrec.models import DIN, InterestPooling
from meshrec.optim import SGD
from meshrec.testing import assert_equal_to_unsharded

NUM_ITEMS, NUM_USERS, WIDTH, BATCH = 20, 6, 8, 4


def make_model():
    torch.manual_seed(0)
    items = EmbeddingConfig(
        name="items", num_embeddings=NUM_ITEMS, embedding_dim=WIDTH, feature_names=["history", "item"]
    )
    users = EmbeddingBagConfig(
        name="users", num_embeddings=NUM_USERS, embedding_dim=4, feature_names=["user"]
    )
    return DIN(
        EmbeddingCollection(tables=[items]),
        EmbeddingBagCollection(tables=[users]),
        history="history",
        item="item",
        dense_in_features=2,
        attention=[5],
        over=[7, 1],
    )


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 0, 1, 2] + [1] * 2 * BATCH)
    items = torch.randint(0, NUM_ITEMS, (6 + BATCH,), generator=generator)
    users = torch.randint(0, NUM_USERS, (BATCH,), generator=generator)
    sparse = KeyedJaggedTensor(["history", "item", "user"], torch.cat([items, users]), lengths=lengths)
    return torch.rand(BATCH, 2, generator=generator), sparse


def test_pooling_is_the_weighted_sum_of_each_history():
    torch.manual_seed(0)
    pooling = InterestPooling(WIDTH, [5])
    rows, offered = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    found = pooling(JaggedTensor(rows, lengths=torch.tensor([2, 0, 1])), offered)

    def weighted(row, item):
        return row * pooling.weigh(torch.cat([row, item, row - item, row * item])[None])[0]

    assert torch.allclose(found[0], weighted(rows[0], offered[0]) + weighted(rows[1], offered[0]), atol=1e-6)
    assert torch.equal(found[1], torch.zeros(WIDTH))
    assert torch.allclose(found[2], weighted(rows[2], offered[2]), atol=1e-6)


def test_a_logit_for_each_sample():
    assert make_model()(*inputs(0)).shape == (BATCH, 1)


def test_one_table_for_both():
    table = EmbeddingConfig(name="items", num_embeddings=5, embedding_dim=4, feature_names=["history"])
    with pytest.raises(ValueError, match=r"'history'.*'item'.*\['items'\]"):
        DIN(EmbeddingCollection(tables=[table]), None, history="history", item="item")


def check_sharded():
    model = make_model()
    plan = {
        "embedding_collection": md.construct_module_sharding_plan(
            model.embedding_collection, {"items": md.row_wise()}, world_size=2
        ),
        "embedding_bag_collection": md.construct_module_sharding_plan(
            model.embedding_bag_collection, {"users": md.table_wise(rank=1)}, world_size=2
        ),
    }
    assert_equal_to_unsharded(
        make_model,
        md.ShardingPlan(plan),
        [[inputs(2 * step), inputs(2 * step + 1)] for step in range(3)],
        loss=lambda logits: logits.square().mean(),
        sharders=[md.EmbeddingBagCollectionSharder(SGD(lr=0.1)), md.EmbeddingCollectionSharder(SGD(lr=0.1))],
    )


def test_sharded_equals_unsharded(ranks):
    ranks(2).run(check_sharded)
