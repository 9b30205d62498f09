import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, fuse
from meshrec import distributed as md
from meshrec.optim import Adam, KeyedOptimizer


def make_module():
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=4, feature_names=["a"])
            for name in ("t0", "t1")
        ]
    )


def sharded():
    module = make_module()
    plan = md.construct_module_sharding_plan(
        module, {"t0": md.row_wise(), "t1": md.data_parallel()}, world_size=1
    )
    return md.EmbeddingBagCollectionSharder(Adam(lr=0.1)).shard(module, plan, md.ShardingEnv.single_process())


def train(module):
    features = KeyedJaggedTensor(["a"], torch.tensor([1, 2, 2]), lengths=torch.tensor([2, 1]))
    module(features).values().square().sum().backward()


def test_it_is_a_keyed_optimizer_with_the_state_of_whole_tables():
    module = sharded()
    optimizer = module.fused_optimizer
    assert isinstance(optimizer, KeyedOptimizer)
    assert optimizer.updates_in_backward
    train(module)
    state = optimizer.state_dict()
    assert sorted(state["state"]) == ["embedding_bags.t0.weight", "embedding_bags.t1.weight"]
    slots = state["state"]["embedding_bags.t0.weight"]
    assert slots["step"] == 1
    assert slots["exp_avg"].shape == (10, 4)
    assert slots["exp_avg"].abs().sum() > 0
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_loaded_state_goes_on_as_the_saved_one_did():
    first, second = sharded(), sharded()
    train(first)
    second.load_state_dict(first.state_dict())
    second.fused_optimizer.load_state_dict(first.fused_optimizer.state_dict())
    train(first)
    train(second)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_numbers_of_the_groups_are_read_at_every_update():
    module = sharded()
    before = [parameter.clone() for parameter in module.parameters()]
    module.fused_optimizer.param_groups[0]["lr"] = torch.tensor(0.0)
    train(module)
    assert all(map(torch.equal, before, module.parameters()))


def test_step_does_nothing_but_the_closure():
    optimizer = sharded().fused_optimizer
    assert optimizer.step(lambda: 3.0) == 3.0
    assert optimizer.step() is None
    with pytest.raises(ValueError, match="sharded"):
        optimizer.add_param_group({})


def test_tables_of_one_rule_count_their_own_updates():
    """A table that was frozen for a while, and one that was loaded with more updates, go on as unsharded."""
    torch.manual_seed(0)
    whole = fuse(make_module(), optimizer=Adam(lr=0.1))
    split = sharded()
    for module in (whole, split):
        frozen = module.embedding_bags["t1"].weight
        frozen.requires_grad_(False)
        train(module)
        frozen.requires_grad_(True)
        train(module)
        state = module.fused_optimizer.state_dict()
        steps = [slots["step"] for slots in state["state"].values()]
        assert steps == [2, 1]
        state["state"]["embedding_bags.t1.weight"]["step"] = 7
        module.fused_optimizer.load_state_dict(state)
        train(module)
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        assert torch.equal(one, other)
    assert split.built.steps() == [3, 8]
