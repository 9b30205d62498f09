import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from meshrec import model_parallel as core
from meshrec.comms.mesh import default_env
from meshrec.compat.bridge import embeddings
from meshrec.compat.bridge import sharding_plan as sp
from meshrec.compat.bridge.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    shard,
    shard_modules,
)
from meshrec.compat.bridge.plans import ShardingPlan
from meshrec.compat.bridge.sharders import EmbeddingBagCollectionSharder
from meshrec.distributed import ShardedEmbeddingBagCollection
from meshrec.optim import SGD


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
        self.ebc = EmbeddingBagCollection([config])
        self.over = nn.Linear(4, 1)

    def forward(self, features):
        return self.over(self.ebc(features).values())


def features():
    return KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))


def by_hand(module, world_size=1):
    generators = {"t": sp.table_wise(rank=world_size - 1, compute_kernel="fused")}
    return sp.construct_module_sharding_plan(module, generators, None, world_size, world_size, "cpu")


def test_one_process_without_a_group():
    torch.manual_seed(0)
    model = Model()
    expected = model(features()).detach()
    plan = ShardingPlan({"ebc": by_hand(model.ebc)})
    sharders = [EmbeddingBagCollectionSharder({"optimizer": SGD(lr=0.5)})]
    dmp = DistributedModelParallel(model, plan=plan, sharders=sharders)
    torch.testing.assert_close(dmp(features()).detach(), expected)
    assert dmp.plan == plan
    assert isinstance(dmp, core.DistributedModelParallel)
    assert next(name for name, _ in dmp.bare_named_parameters()) == "ebc.embedding_bags.t.weight"
    assert dmp.sharders == sharders
    assert dmp.fused_optimizer.param_groups[0]["lr"] == 0.5


def test_without_a_plan_one_is_made():
    dmp = DistributedModelParallel(Model())
    assert list(dmp.plan.plan["ebc"]) == ["t"]


def wrapped(options):
    torch.manual_seed(0)
    model = Model()
    plan = ShardingPlan({"ebc": by_hand(model.ebc, dist.get_world_size())})
    dmp = DistributedModelParallel(
        model, plan=plan, data_parallel_wrapper=DefaultDataParallelWrapper(**options)
    )
    dmp.init_data_parallel()  # a second time changes nothing
    dmp(features()).sum().backward()
    ddp = dmp._dmp_wrapped_module
    return type(ddp).__name__, ddp.static_graph, dmp.module.over.weight.grad.tolist()


def test_the_dense_part_is_wrapped(ranks):
    found = ranks(2).run(wrapped, {"bucket_cap_mb": 1})
    assert found[0] == found[1]
    assert found[0][:2] == ("DistributedDataParallel", True)
    shorter = ranks(2).run(wrapped, {"allreduce_comm_precision": "fp16", "static_graph": False})
    assert shorter[0][1] is False
    torch.testing.assert_close(torch.tensor(shorter[0][2]), torch.tensor(found[0][2]), rtol=1e-2, atol=1e-3)


class Mark(DataParallelWrapper):
    def wrap(self, dmp, env, device):
        dmp._dmp_wrapped_module = nn.Sequential(dmp._dmp_wrapped_module)


def test_a_wrapper_of_the_users():
    dmp = DistributedModelParallel(Model(), data_parallel_wrapper=Mark())
    assert isinstance(dmp._dmp_wrapped_module, nn.Sequential)
    assert dmp(features()).shape == (2, 1)


def test_single_modules():
    torch.manual_seed(0)
    for plan in (sp.table_wise(rank=0), {"t": sp.row_wise()}, by_hand(Model().ebc)):
        ebc = Model().ebc
        expected = ebc(features()).values().detach()
        sharded = shard(ebc, plan)
        assert isinstance(sharded, ShardedEmbeddingBagCollection)
        torch.testing.assert_close(sharded(features()).values().detach(), expected)
    model = shard_modules(Model())
    assert isinstance(model.ebc, ShardedEmbeddingBagCollection)
    assert type(model) is Model


def test_wrong_arguments():
    with pytest.raises(ValueError, match="MeshRec"):
        DistributedModelParallel(Model(), model_tracker_configs=object())
    with pytest.raises(ValueError, match=r"allreduce_comm_precision.*\['bf16', 'fp16'\]"):
        DefaultDataParallelWrapper(allreduce_comm_precision="fp8")
    with pytest.raises(ValueError, match="params_to_ignore"):
        DefaultDataParallelWrapper(params_to_ignore=["w"])
    with pytest.raises(ValueError, match="embedding"):
        shard(nn.Linear(1, 1), sp.row_wise())


def test_a_plan_of_another_level_is_refused():
    model = Model()
    module_plan = by_hand(model.ebc)
    for plan in (module_plan, {"ebc": module_plan}):
        with pytest.raises(TypeError, match=f"ShardingPlan.*{type(plan).__name__}"):
            DistributedModelParallel(model, plan=plan)
        with pytest.raises(TypeError, match=f"ShardingPlan.*{type(plan).__name__}"):
            core.DistributedModelParallel(model, plan=plan)
    with pytest.raises(TypeError, match="ShardingPlan"):
        shard(model.ebc, ShardingPlan({"ebc": module_plan}))


def test_bridged_collections_are_sharded_by_themselves():
    config = EmbeddingConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
    module = embeddings.EmbeddingCollection(tables=[config])
    sharded = shard(module, sp.table_wise(rank=0), default_env(), torch.device("cpu"))
    assert torch.equal(sharded(features())["f"].values(), module(features())["f"].values())


def gradients_of_two_steps():
    torch.manual_seed(0)
    dmp = DistributedModelParallel(Model())
    dmp(features()).sum().backward()  # DistributedDataParallel's static graph is learned
    dmp.zero_grad()
    rank = dist.get_rank()
    with dmp.no_sync():
        (dmp(features()).sum() * (1 + rank)).backward()
    here = dmp.module.over.bias.grad.clone()
    (dmp(features()).sum() * (1 + rank)).backward()
    return here.item(), dmp.module.over.bias.grad.item()


def test_no_sync_adds_the_dense_gradients_of_a_rank(ranks):
    assert ranks(2).run(gradients_of_two_steps) == [(2.0, 6.0), (4.0, 6.0)]


def test_no_sync_in_one_process():
    dmp = DistributedModelParallel(Model())
    with dmp.no_sync():
        dmp(features()).sum().backward()
    assert dmp.module.over.bias.grad.item() == 2.0


def test_state_is_loaded_strictly_unless_told_otherwise():
    dmp = DistributedModelParallel(Model())
    with pytest.raises(RuntimeError, match="over"):
        dmp.load_state_dict({})
    dmp.load_state_dict({}, strict=False)
    with pytest.raises(ValueError, match=r"'model\.'"):
        dmp.load_state_dict({}, prefix="model.")
