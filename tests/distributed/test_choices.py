"""One parameter has one optimizer, wherever it was chosen; sharding leaves the module as it was."""

import copy
import warnings

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, fuse
from meshrec import distributed as md
from meshrec.comms.mesh import ShardingEnv
from meshrec.compat.bridge import sharders as bridge
from meshrec.compat.bridge.optimizers import EmbOptimType
from meshrec.optim import SGD, Adam, RowWiseAdagrad, apply_optimizer_in_backward, in_backward_spec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's package uses what torch has deprecated
    from torch.distributed.optim import _apply_optimizer_in_backward

ENV = ShardingEnv.single_process()


def collection():
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=6, embedding_dim=4, feature_names=[name])
        for name in ("t0", "t1")
    ]
    return EmbeddingBagCollection(tables=tables)


def plan(module):
    builders = {"t0": md.table_wise(rank=0), "t1": md.data_parallel()}
    return md.construct_module_sharding_plan(module, builders, world_size=1)


def own_sharder(spec=None, **options):
    return md.EmbeddingBagCollectionSharder(spec, **options)


def bridge_sharder(spec=None):
    names = {SGD: EmbOptimType.EXACT_SGD, RowWiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    fused = None if spec is None else {"optimizer": names[type(spec)], "learning_rate": spec.lr}
    return bridge.EmbeddingBagCollectionSharder(fused)


def shard(sharder, module):
    return sharder.shard(module, plan(module), ENV)


def features():
    return KeyedJaggedTensor(["t0", "t1"], torch.tensor([1, 2]), lengths=torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("sharder", [own_sharder, bridge_sharder])
def test_sharding_does_not_mark_the_module(sharder):
    module = collection()
    shard(sharder(RowWiseAdagrad(lr=0.02)), module)
    assert [vars(weight) for weight in module.parameters()] == [{}, {}]
    second = copy.deepcopy(module)
    _apply_optimizer_in_backward(torch.optim.SGD, second.parameters(), {"lr": 0.5})
    sharded = shard(sharder(), second)
    assert [in_backward_spec(weight) for weight in sharded.parameters()] == [SGD(lr=0.5)] * 2
    before = sharded.embedding_bags["t0"].weight.detach().clone()
    sharded(features()).values().sum().backward()
    assert torch.allclose(sharded.embedding_bags["t0"].weight[1], before[1] - 0.5)


def test_the_sharders_optimizer_is_for_the_tables_that_are_named():
    module = collection()
    apply_optimizer_in_backward(torch.optim.Adam, [module.embedding_bags["t1"].weight], {"lr": 0.1})
    sharded = shard(own_sharder(SGD(lr=0.5), tables=["t0"]), module)
    assert [in_backward_spec(weight) for weight in sharded.parameters()] == [SGD(lr=0.5), Adam(lr=0.1)]
    sharded = shard(own_sharder(SGD(lr=0.5), tables=[]), collection())
    assert [in_backward_spec(weight) for weight in sharded.parameters()] == [None, None]
    with pytest.raises(ValueError, match=r"'t2'.*\['t0', 't1'\]"):
        shard(own_sharder(SGD(lr=0.5), tables=["t2"]), collection())


def fused_then_torchs():
    module = fuse(collection(), optimizer=RowWiseAdagrad(lr=0.02))
    _apply_optimizer_in_backward(torch.optim.SGD, [module.embedding_bags["t0"].weight], {"lr": 0.5})
    return module


def chosen_then_torchs():
    module = collection()
    apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.02})
    _apply_optimizer_in_backward(torch.optim.SGD, [module.embedding_bags["t0"].weight], {"lr": 0.5})
    return module


def sharded_then_torchs():
    module = shard(own_sharder(RowWiseAdagrad(lr=0.02)), collection())
    _apply_optimizer_in_backward(torch.optim.SGD, [module.embedding_bags["t0"].weight], {"lr": 0.5})
    return module


BOTH = r"has 2 optimizers in backward, RowWiseAdagrad\(lr=0.02.*\) and torch's SGD\(\{'lr': 0.5\}\)"


@pytest.mark.parametrize("make", [fused_then_torchs, chosen_then_torchs])
@pytest.mark.parametrize("sharder", [own_sharder, bridge_sharder])
@pytest.mark.parametrize("copied", [lambda module: module, copy.deepcopy], ids=["itself", "copy"])
def test_two_choices_are_an_error_that_names_both(make, sharder, copied):
    with pytest.raises(ValueError, match=BOTH):
        shard(sharder(), copied(make()))


def test_a_choice_beside_the_one_that_trains_is_an_error_before_the_first_update():
    module = fused_then_torchs()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match=BOTH):
        module(features()).values().sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    sharded = sharded_then_torchs()
    with pytest.raises(ValueError, match=BOTH):
        sharded(features())
    with pytest.raises(ValueError, match=BOTH):
        fuse(chosen_then_torchs())


def test_ordinary_gradients_may_have_torchs_optimizer_after_sharding():
    module = shard(own_sharder(), collection())
    _apply_optimizer_in_backward(torch.optim.RMSprop, module.parameters(), {"lr": 0.5})
    before = module.embedding_bags["t0"].weight.detach().clone()
    module(features()).values().sum().backward()
    assert not torch.equal(module.embedding_bags["t0"].weight[1], before[1])


def test_it_is_too_late_to_choose_for_a_sharded_table():
    module = shard(own_sharder(), collection())
    with pytest.raises(ValueError, match="parameter 0"):
        apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.5})
