import pytest

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.compat.bridge import planner
from meshrec.compat.bridge.sharders import EmbeddingBagCollectionSharder
from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner import types


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


def test_constraints():
    found = planner.ParameterConstraints(
        ["row_wise"], min_partition=8, pooling_factors=[3.0], is_weighted=True
    )
    assert found == types.ParameterConstraints(
        sharding_types=["row_wise"], min_partition=8, pooling_factors=[3.0]
    )
    assert planner.ParameterConstraints().pooling_factors is None


def test_plans_have_their_form_and_our_proof(ebc):
    plan = make().plan(ebc, [EmbeddingBagCollectionSharder()])
    assert sorted(plan.plan[""]) == ["a", "b"]
    assert plan.planned.lower_bound <= plan.planned.seconds
    assert make().collective_plan(ebc).plan == plan.plan


def test_what_the_user_says_of_a_sharder_counts(ebc):
    found = make().plan(ebc, [ColumnsOnly()]).plan[""]
    assert {placed.sharding_type for placed in found.values()} == {"column_wise"}
    assert {placed.compute_kernel for placed in found.values()} == {"fused"}


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
        (lambda: make(proposer=object()), "MeshRec's planner has no proposer to exchange"),
        (lambda: planner.Topology(2, "cpu", hbm_mem_bw=1.0), "MeshRec's topology has no hbm_mem_bw"),
        (lambda: planner.Topology(2, "cpu", pod_size=1), "MeshRec's topology has no pod_size"),
        (
            lambda: planner.ParameterConstraints(compute_kernels=["fused_uvm"]),
            r"the compute kernels \['dense', 'fused', 'quant'\], got \['fused_uvm'\]",
        ),
        (lambda: planner.ParameterConstraints(enforce_hbm=True), "no constraint enforce_hbm"),
        (lambda: planner.ParameterConstraints(use_virtual_table=True), "no virtual tables"),
    ],
)
def test_what_is_not_to_be_had(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_small_helpers():
    assert planner.bytes_to_gb(1 << 30) == 1
    assert planner.sharder_name(dict) == "builtins.dict"
