import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, fuse
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.distributed import build
from meshrec.optim import SGD, RowWiseAdagrad, apply_optimizer_in_backward, in_backward_optimizer_filter


def collection(device=None):
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=4, feature_names=["a"])
            for name in ("t0", "t1")
        ],
        device=device,
    )


def features():
    return KeyedJaggedTensor(["a"], torch.tensor([1, 2, 2]), lengths=torch.tensor([2, 1]))


def train(module):
    module(features()).values().square().sum().backward()


def one_process_plan(module):
    return md.construct_module_sharding_plan(
        module, {"t0": md.row_wise(), "t1": md.data_parallel()}, world_size=1
    )


ENV = md.ShardingEnv.single_process()


def test_names_of_features_that_several_tables_read():
    module = collection()
    sharded = md.EmbeddingBagCollectionSharder().shard(module, one_process_plan(module), ENV)
    assert list(sharded(features()).keys()) == ["a@t0", "a@t1"] == module.embedding_names()


def test_a_fused_module_keeps_its_state():
    expected = fuse(collection(), optimizer=RowWiseAdagrad(lr=0.1))
    module = fuse(collection(), optimizer=RowWiseAdagrad(lr=0.1))
    train(module)
    sharded = md.EmbeddingBagCollectionSharder().shard(module, one_process_plan(module), ENV)
    train(sharded)
    train(expected)
    train(expected)
    for name, table in expected.embedding_bags.items():
        torch.testing.assert_close(sharded.embedding_bags[name].weight, table.weight)
    assert {state["step"] for state in sharded.fused_optimizer.state.values()} == {2}


@pytest.mark.parametrize(
    ("fused", "chosen", "in_backward"),
    [
        ("on_step", None, False),
        ("in_backward", None, True),
        ("on_step", "in_backward", True),
        (None, "on_step", False),
    ],
)
def test_when_tables_are_updated(fused, chosen, in_backward):
    module = collection()
    if fused is not None:
        fuse(module, optimizer=SGD(lr=0.1), update=fused)
    sharder = md.EmbeddingBagCollectionSharder(SGD(lr=0.1), update=chosen)
    sharded = sharder.shard(module, one_process_plan(module), ENV)
    assert sharded.fused_optimizer.updates_in_backward == in_backward


def test_each_table_keeps_its_own_optimizer():
    module = collection()
    apply_optimizer_in_backward(torch.optim.SGD, [module.embedding_bags["t1"].weight], {"lr": 0.5})
    sharded = md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1)).shard(
        module, one_process_plan(module), ENV
    )
    specs = {name: table.rule.spec for name, table in sharded.fused_optimizer.tables.items()}
    assert specs == {
        "embedding_bags.t0.weight": RowWiseAdagrad(lr=0.1),
        "embedding_bags.t1.weight": SGD(lr=0.5),
    }


def test_the_filter_knows_the_tables_that_update_themselves():
    module = collection()
    apply_optimizer_in_backward(torch.optim.SGD, [module.embedding_bags["t1"].weight], {"lr": 0.5})
    sharded = md.EmbeddingBagCollectionSharder().shard(module, one_process_plan(module), ENV)
    left_over = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    assert list(left_over) == ["embedding_bags.t0.weight"]


def test_sharding_copies():
    module = collection()
    before = module.embedding_bags["t0"].weight.detach().clone()
    train(md.EmbeddingBagCollectionSharder(SGD(lr=0.1)).shard(module, one_process_plan(module), ENV))
    assert torch.equal(module.embedding_bags["t0"].weight, before)


def allocated_from_meta():
    env = default_env()
    module = collection("meta")
    plan = md.construct_module_sharding_plan(
        module, {"t0": md.row_wise(), "t1": md.table_wise(rank=1)}, world_size=env.shard.size
    )
    sharded = md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1)).shard(module, plan, env)
    return [(name, list(parameter.shape)) for name, parameter in sharded.named_parameters()]


def test_only_what_a_rank_owns_is_allocated(ranks):
    first, second = ranks(2).run(allocated_from_meta)
    assert first == [("embedding_bags.t0.weight", [5, 4]), ("embedding_bags.t1.weight", [0, 4])]
    assert second == [("embedding_bags.t0.weight", [5, 4]), ("embedding_bags.t1.weight", [10, 4])]


def test_a_plan_must_fit():
    plan = one_process_plan(collection())
    del plan["t1"]
    with pytest.raises(ValueError, match="'t1'"):
        md.EmbeddingBagCollectionSharder().shard(collection("meta"), plan, ENV)


def allocate_with_one_failing_rank(error):
    env, module = default_env(), collection()
    plan = md.construct_module_sharding_plan(
        module, {"t0": md.row_wise(), "t1": md.data_parallel()}, world_size=2
    )

    def fail(*_, **__):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        if env.world.rank == 1:
            patch.setattr(build, "allocate", fail)
        try:
            md.EmbeddingBagCollectionSharder().shard(module, plan, env)
        except Exception as caught:
            return type(caught), str(caught)


def test_an_error_of_one_ranks_allocation_is_the_same_on_all(ranks):
    error = MemoryError("no room for t0")
    assert (
        ranks(2).run(allocate_with_one_failing_rank, error) == [(MemoryError, "rank 1: no room for t0")] * 2
    )
