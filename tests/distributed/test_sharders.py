import copy

import pytest
import torch
import torch.distributed as dist

import meshrec
from meshrec import distributed as md
from meshrec.distributed import CommsPrecision, EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from meshrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.optim import SGD, RowWiseAdagrad
from meshrec.sparse import KeyedJaggedTensor


@pytest.mark.parametrize("kind", [EmbeddingBagCollectionSharder, EmbeddingCollectionSharder])
def test_fused_params(kind):
    spec = RowWiseAdagrad(lr=0.02)
    assert kind().optimizer is None
    assert kind(spec).optimizer is spec
    assert kind({"optimizer": spec}).optimizer is spec
    assert kind({"optimizer": RowWiseAdagrad, "learning_rate": 0.02}).optimizer == spec
    assert kind({"optimizer": torch.optim.SGD, "lr": 0.5}).optimizer == SGD(lr=0.5)
    with pytest.raises(ValueError, match=r"fused_params.*'lr'.*0.5"):
        kind({"lr": 0.5})


def test_precision():
    assert EmbeddingBagCollectionSharder().precision.forward == torch.float32
    half = CommsPrecision(torch.float16, torch.bfloat16)
    assert EmbeddingBagCollectionSharder(precision=half).precision is half


def trained_in_16_bits(kind):
    """For each rectangle here whether it equals, after some steps, what the fused module has there."""
    config = EmbeddingBagConfig(
        name="t0", num_embeddings=12, embedding_dim=8, feature_names=["a"], data_type=DataType.BF16
    )
    torch.manual_seed(3)
    whole = meshrec.fuse(EmbeddingBagCollection(tables=[config]), optimizer=SGD(lr=0.3), seed=9)
    builders = {
        "row_wise": md.row_wise(),
        "column_wise": md.column_wise(),
        "grid": md.grid_shard(),
        "data_parallel": md.data_parallel(),
    }
    plan = md.construct_module_sharding_plan(
        copy.deepcopy(whole), {"t0": builders[kind]}, world_size=dist.get_world_size()
    )
    sharded = EmbeddingBagCollectionSharder().shard(copy.deepcopy(whole), plan)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 12, (dist.get_world_size(), 6), generator=generator)
        # Sums of these are exact in every order.
        grad = torch.randint(-8, 9, (dist.get_world_size(), 3, 8), generator=generator) / 8
        lengths = torch.tensor([2, 3, 1])
        mine = dist.get_rank()
        output = sharded(KeyedJaggedTensor(["a"], ids[mine], lengths=lengths))
        output.values().backward(grad[mine])
        everything = KeyedJaggedTensor(["a"], ids.view(-1), lengths=lengths.repeat(len(ids)))
        whole(everything).values().backward(grad.view(-1, 8) / len(ids))
    table, shards = whole.embedding_bags["t0"].weight.detach(), sharded.embedding_bags["t0"]
    return [
        torch.equal(table[r.r0 : r.r1, r.c0 : r.c1], part)
        for r, part in zip(shards.rectangles, shards.shards(), strict=True)
    ]


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "grid", "data_parallel"])
def test_16_bit_tables_are_rounded_as_the_unsharded_module_rounds(ranks, kind):
    for equal in ranks(2).run(trained_in_16_bits, kind):
        assert equal
        assert all(equal)
