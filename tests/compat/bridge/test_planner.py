import pytest
import torch
from torch import nn

from meshrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.compat.bridge import planner
from meshrec.compat.bridge.constraints import ParameterConstraints
from meshrec.compat.bridge.model_parallel import DistributedModelParallel
from meshrec.compat.bridge.quant_sharders import QuantEmbeddingBagCollectionSharder
from meshrec.compat.bridge.sharders import EmbeddingBagCollectionSharder
from meshrec.optim import apply_optimizer_in_backward
from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner import types
from meshrec.quant import quantize


@pytest.fixture
def ebc():
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=64, embedding_dim=64, feature_names=[name])
        for name in ("a", "b")
    ]
    return EmbeddingBagCollection(tables, device="meta")


def make(**given):
    topology = planner.Topology(2, "cpu", ddr_cap=1 << 30)
    return planner.EmbeddingShardingPlanner(**{"topology": topology, "timeout_seconds": 2, **given})


class ColumnsOnly(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type):
        return [ShardingType.COLUMN_WISE.value]


def test_topologies_in_their_order_and_units():
    found = planner.Topology(8, "cuda", 80, 90, local_world_size=4, intra_host_bw=3.0, inter_host_bw=2.0)
    assert found == types.Topology(
        world_size=8,
        compute_device="cuda",
        hbm_cap=80,
        ddr_cap=90,
        local_world_size=4,
        intra_host_bandwidth=3000.0,
        inter_host_bandwidth=2000.0,
    )
    assert planner.Topology(world_size=16, compute_device="cuda").local_size == 16


def test_plans_have_their_form_and_our_proof(ebc):
    plan = make().plan(ebc, [EmbeddingBagCollectionSharder()])
    assert sorted(plan.plan[""]) == ["a", "b"]
    assert plan.planned.lower_bound <= plan.planned.seconds
    with pytest.raises(ValueError, match=r"2 ranks.*group.* 1"):
        make().collective_plan(ebc)


def test_what_the_user_says_of_a_sharder_counts(ebc):
    found = make().plan(ebc, [ColumnsOnly()]).plan[""]
    assert {placed.sharding_type for placed in found.values()} == {"column_wise"}
    assert {placed.compute_kernel for placed in found.values()} == {"fused"}


class DenseOnly(EmbeddingBagCollectionSharder):
    def compute_kernels(self, sharding_type, compute_device_type):
        return ["dense"]


def kernels(plan):
    return {name: placed.compute_kernel for name, placed in plan.plan[""].items()}


def test_kernels_are_those_that_run(ebc):
    rows = {name: ParameterConstraints(sharding_types=["row_wise"]) for name in "ab"}
    assert kernels(make(constraints=rows).plan(ebc, [EmbeddingBagCollectionSharder()])) == {
        "a": "fused",
        "b": "fused",
    }
    assert kernels(make(constraints=rows).plan(ebc, [DenseOnly()])) == {"a": "dense", "b": "dense"}
    copies = {name: ParameterConstraints(sharding_types=["data_parallel"]) for name in "ab"}
    apply_optimizer_in_backward(torch.optim.SGD, [ebc.embedding_bags["a"].weight], {"lr": 0.1})
    found = make(constraints=copies).plan(ebc, [EmbeddingBagCollectionSharder()])
    assert kernels(found) == {"a": "fused", "b": "dense"}
    assert [placed.ranks for placed in found.plan[""].values()] == [[0, 1], [0, 1]]
    quantised = quantize(EmbeddingBagCollection(ebc.embedding_bag_configs()), DataType.INT8)
    assert set(kernels(make().plan(quantised, [QuantEmbeddingBagCollectionSharder()])).values()) == {"quant"}


def test_rows_go_over_all_ranks(ebc):
    topology = planner.Topology(world_size=8, compute_device="cuda", local_world_size=4)
    rows = {name: ParameterConstraints(sharding_types=["row_wise"]) for name in "ab"}
    found = make(topology=topology, constraints=rows).plan(ebc, [EmbeddingBagCollectionSharder()])
    assert [placed.ranks for placed in found.plan[""].values()] == [list(range(8))] * 2


def test_a_constraint_holds_for_the_tables_of_that_name_in_all_modules():
    def bags(columns):
        tables = [EmbeddingBagConfig(name="t", num_embeddings=64, embedding_dim=columns, feature_names=["f"])]
        return EmbeddingBagCollection(tables, device="meta")

    rows = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    model = nn.ModuleDict({"a": bags(64), "b": bags(32)})
    plan = make(constraints=rows).plan(model, [EmbeddingBagCollectionSharder()])
    assert {path: plan.plan[path]["t"].sharding_type for path in "ab"} == {"a": "row_wise", "b": "row_wise"}
    assert [len(plan.plan[path]["t"].ranks) for path in "ab"] == [2, 2]


def test_a_model_without_tables_has_an_empty_plan():
    linear = nn.Linear(2, 2)
    assert make().plan(linear, [EmbeddingBagCollectionSharder()]).plan == {}
    assert make().collective_plan(linear).plan == {}
    dmp = DistributedModelParallel(linear)
    assert dmp.plan.plan == {}
    assert dmp(torch.ones(1, 2)).shape == (1, 2)


def test_memory_is_reserved(ebc):
    reservation = planner.HeuristicalStorageReservation(0.2, dense_tensor_estimate=1 << 20)
    assert make(storage_reservation=reservation).plan(ebc, [EmbeddingBagCollectionSharder()])
    small = planner.Topology(1, "cpu", ddr_cap=40_000)
    tight = planner.FixedPercentageStorageReservation(percentage=0.5)
    with pytest.raises(ValueError, match="memory"):
        make(topology=small, storage_reservation=tight).plan(ebc, [EmbeddingBagCollectionSharder()])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make(proposer=object()), "MeshRec"),
        (lambda: planner.Topology(2, "cpu", hbm_mem_bw=1.0), "MeshRec.*hbm_mem_bw"),
        (lambda: planner.Topology(2, "cpu", pod_size=1), "MeshRec.*pod_size"),
    ],
)
def test_what_is_not_to_be_had(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_small_helpers():
    assert planner.bytes_to_gb(1 << 30) == 1
    assert planner.sharder_name(dict) == "builtins.dict"
