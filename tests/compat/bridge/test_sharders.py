import pytest
import torch
from torch import nn

from meshrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from meshrec.compat.bridge import qcomms
from meshrec.compat.bridge import sharding_plan as sp
from meshrec.compat.bridge.awaitables import Awaitable, LazyAwaitable
from meshrec.compat.bridge.keyed import CombinedOptimizer, KeyedOptimizer
from meshrec.compat.bridge.model_parallel import DistributedModelParallel
from meshrec.compat.bridge.optimizers import EmbOptimType
from meshrec.compat.bridge.plans import module_to_core
from meshrec.compat.bridge.sharded import ShardedEmbeddingBagCollection
from meshrec.compat.bridge.sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ModuleSharder,
)
from meshrec.distributed import sharders as core
from meshrec.optim import SGD, in_backward_spec
from meshrec.plan import builders
from meshrec.plan import sharding_plan as own_plans

FUSED = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}


def bags():
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=4, embedding_dim=2, feature_names=[name])
        for name in ("fused", "dense", "copies")
    ]
    return EmbeddingBagCollection(tables)


def plan(module, **generators):
    return sp.construct_module_sharding_plan(module, generators, None, 1, 1, "cpu")


def test_fused_params_become_an_optimizer():
    assert EmbeddingBagCollectionSharder(fused_params=FUSED).optimizer == SGD(lr=0.5)
    assert EmbeddingCollectionSharder(FUSED).fused_params == FUSED
    assert EmbeddingBagCollectionSharder().optimizer == SGD(lr=0.01)


def test_the_plans_kernel_says_which_tables_are_fused(caplog):
    module = bags()
    module_plan = plan(
        module,
        fused=sp.table_wise(0, compute_kernel="fused"),
        dense=sp.table_wise(0),
        copies=sp.data_parallel(),
    )
    sharded = EmbeddingBagCollectionSharder(FUSED).shard(module, module_plan, None, torch.device("cpu"))
    specs = {name.split(".")[1]: in_backward_spec(p) for name, p in sharded.named_parameters()}
    assert specs == {"fused": SGD(lr=0.5), "dense": None, "copies": None}
    assert "['dense', 'copies'] with the compute kernel 'dense'" in caplog.text


def test_without_fused_params_tables_are_trained_as_there(caplog):
    module = bags()
    kernels = {"fused": "fused", "dense": "dense", "copies": "fused"}
    makers = {name: sp.table_wise(0, compute_kernel=kernel) for name, kernel in kernels.items()}
    module_plan = plan(module, **makers)
    sharded = EmbeddingBagCollectionSharder().shard(module, module_plan, None, torch.device("cpu"))
    before = {name: value.clone() for name, value in sharded.state_dict().items()}
    ids = KeyedJaggedTensor(
        ["fused", "dense", "copies"], torch.tensor([1, 2, 3]), lengths=torch.ones(3).int()
    )
    sharded(ids).values().sum().backward()
    moved = {name.split(".")[1]: (before[name] - v).max() for name, v in sharded.state_dict().items()}
    assert {name: pytest.approx(float(v), abs=1e-7) for name, v in moved.items()} == {
        "fused": 0.01,
        "dense": 0,
        "copies": 0.01,
    }
    grads = {name.split(".")[1]: p.grad for name, p in sharded.named_parameters()}
    assert [name for name, grad in grads.items() if grad is not None] == ["dense"]
    assert [placed.compute_kernel.value for placed in sharded.plan.values()] == ["fused", "dense", "fused"]
    assert caplog.messages == []


def test_a_sharded_module_shows_its_optimizers_and_stages():
    module = bags()
    module_plan = plan(module, **dict.fromkeys(names_of(module), sp.table_wise(0, compute_kernel="fused")))
    sharded = EmbeddingBagCollectionSharder(FUSED).shard(module, module_plan)
    assert isinstance(sharded, ShardedEmbeddingBagCollection)
    assert isinstance(sharded.fused_optimizer, CombinedOptimizer)
    (_, inner), *rest = sharded.fused_optimizer.optimizers
    assert rest == []
    assert isinstance(inner, KeyedOptimizer)
    assert not isinstance(inner, CombinedOptimizer)
    assert list(inner.params) == [f"embedding_bags.{name}.weight" for name in names_of(module)]
    for shown in (sharded._input_dists, sharded._lookups, sharded._output_dists):
        assert "table_wise\n    fused: [0:4, 0:2]@0" in repr(shown[0])


def test_a_sharded_model_moves_to_another_plan():
    torch.manual_seed(0)
    model = nn.ModuleDict({"ebc": bags()})
    dmp = DistributedModelParallel(model, sharders=[EmbeddingBagCollectionSharder(FUSED)])
    ids = KeyedJaggedTensor(
        ["fused", "dense", "copies"], torch.tensor([1, 2, 3]), lengths=torch.ones(3).int()
    )
    optimizer = dmp.module["ebc"].fused_optimizer
    before = dmp.module["ebc"](ids).values().detach()
    makers = dict.fromkeys(names_of(dmp.module["ebc"]), builders.column_wise(ranks=[0, 0]))
    moved = builders.construct_module_sharding_plan(dmp.module["ebc"], makers, world_size=1)
    dmp.reshard(own_plans.ShardingPlan({"ebc": moved}))
    assert torch.equal(dmp.module["ebc"](ids).values(), before)
    assert dmp.module["ebc"].fused_optimizer is optimizer
    assert dmp.plan.plan["ebc"]["fused"].compute_kernel == "fused"


def names_of(module):
    return [config.name for config in module.embedding_bag_configs()]


def test_sequences_too():
    module = EmbeddingCollection(
        [EmbeddingConfig(name="t", num_embeddings=4, embedding_dim=2, feature_names=["f"])]
    )
    module_plan = plan(module, t=sp.table_wise(0, compute_kernel="fused"))
    sharded = EmbeddingCollectionSharder(FUSED).shard(module, params=module_plan)
    assert in_backward_spec(next(sharded.parameters())) == SGD(lr=0.5)


def test_answers_for_planners():
    sharder = EmbeddingBagCollectionSharder()
    assert "row_wise" in sharder.sharding_types("cpu")
    assert sharder.compute_kernels("data_parallel", "cpu") == ["dense"]
    assert sharder.compute_kernels("table_wise", "cpu") == ["fused"]
    assert list(sharder.shardable_parameters(bags())) == ["fused", "dense", "copies"]
    assert sharder.module_type is EmbeddingBagCollection


def test_the_type_of_all_sharders():
    assert isinstance(EmbeddingCollectionSharder(), ModuleSharder)
    assert isinstance(core.EmbeddingBagCollectionSharder(), ModuleSharder)
    assert not isinstance(bags(), ModuleSharder)
    assert ModuleSharder[nn.Module] is not None


def quantised(forward, backward):
    return qcomms.get_qcomm_codecs_registry(
        qcomms.QCommsConfig(
            forward_precision=qcomms.CommType[forward], backward_precision=qcomms.CommType[backward]
        ),
        device=torch.device("cpu"),
    )


def test_codecs_choose_the_wire_formats_of_tables():
    registry = quantised("INT8", "BF16")
    other = quantised("FP16", "FP16")
    sharder = EmbeddingBagCollectionSharder(
        qcomm_codecs_registry={
            **registry,
            "POOLED_EMBEDDINGS_REDUCE_SCATTER": other["POOLED_EMBEDDINGS_REDUCE_SCATTER"],
        }
    )
    generators = {"fused": sp.table_wise(rank=0), "dense": sp.row_wise(), "copies": sp.data_parallel()}
    made = module_to_core(sp.construct_module_sharding_plan(bags(), generators, None, 2, 2, "cpu"))
    wires = qcomms.precision_of(sharder.qcomm_codecs_registry, made, pooled=True).wires
    assert str(wires.for_table("fused")) == "int8/bf16"
    assert str(wires.for_table("dense")) == "fp16"
    assert quantised("FP32", "FP32") is None
    full = qcomms.precision_of(None, made, pooled=False).wires
    assert str(full.for_table("dense")) == "fp32"


@pytest.mark.parametrize("kind", ["FP32", "FP16", "BF16", "INT8"])
def test_codecs_encode_and_decode(kind):
    codec = qcomms.get_qcomm_codecs(qcomms.QCommsConfig(qcomms.CommType[kind])).forward
    rows = torch.randn(3, 5, 8)
    coded = codec.encode(rows)
    assert coded.dtype is codec.quantized_dtype
    assert coded.shape == (3, 5, codec.calc_quantized_size(8))
    torch.testing.assert_close(codec.decode(coded), rows, rtol=0.02, atol=0.02)
    assert codec.padded_size(rows[0], [4, 4], 0, codec.create_context()) == (8, 0)


def test_what_codecs_cannot_do_is_told():
    with pytest.raises(ValueError, match=r"CommType\.FP8.*MeshRec"):
        quantised("FP8", "BF16")
    with pytest.raises(ValueError, match="MeshRec"):
        qcomms.get_qcomm_codecs(qcomms.QCommsConfig(qcomms.CommType.FP16, backward_loss_scale=8.0))
    codecs = qcomms.QuantizedCommCodecs(forward=object())
    with pytest.raises(ValueError, match="SEQUENCE_EMBEDDINGS_ALL_TO_ALL"):
        EmbeddingBagCollectionSharder(qcomm_codecs_registry={"SEQUENCE_EMBEDDINGS_ALL_TO_ALL": codecs})
    with pytest.raises(ValueError, match=r"'nothing'.*POOLED"):
        EmbeddingBagCollectionSharder(qcomm_codecs_registry={"nothing": codecs})


def test_the_stages_of_a_batch_give_the_same_as_forward():
    module, lengths = bags(), torch.tensor([2, 0, 1, 1, 0, 2])
    ids = torch.tensor([1, 3, 0, 2, 1, 1])
    features = KeyedJaggedTensor(["fused", "dense", "copies"], ids, lengths=lengths)
    module_plan = plan(module, fused=sp.row_wise(), dense=sp.table_wise(0), copies=sp.data_parallel())
    sharded = EmbeddingBagCollectionSharder(FUSED).shard(module, module_plan, None, torch.device("cpu"))
    context = sharded.create_context()
    first = sharded.input_dist(context, features)
    assert isinstance(first, Awaitable)
    output = sharded.compute(context, first.wait().wait())
    pooled = sharded.output_dist(context, output)
    assert isinstance(pooled, LazyAwaitable)
    assert torch.equal(pooled.values(), module(features).values())
    arrived = sharded.input_dist(context, features).wait().wait()
    again = sharded.compute_and_output_dist(context, arrived)
    assert torch.equal(again.values(), module(features).values())


@pytest.mark.parametrize("sharder", [EmbeddingCollectionSharder(), core.EmbeddingCollectionSharder()])
def test_a_sharder_of_another_kind_is_refused(sharder):
    module = bags()
    copies = dict.fromkeys(("fused", "dense", "copies"), builders.data_parallel())
    module_plan = builders.construct_module_sharding_plan(module, copies, world_size=1)
    with pytest.raises(TypeError, match="EmbeddingBagCollection"):
        sharder.shard(module, module_plan, None, torch.device("cpu"))
