import pytest

from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner.types import OptimizerKind, ParameterConstraints, Table, Topology


class FakeMesh:
    def __init__(self, names, shape, device_type="cpu"):
        self.mesh_dim_names, self.shape, self.device_type = names, shape, device_type

    def size(self):
        total = 1
        for size in self.shape:
            total *= size
        return total


def test_table_sums_over_features():
    table = Table(
        name="t", num_embeddings=10, embedding_dim=4, pooling_factors=(2.0, 5.0), num_poolings=(1, 3)
    )
    assert table.ids_per_sample == 17
    assert table.bags_per_sample == 4
    assert table.num_bytes == 10 * (4 * 4 + 4)  # weights, and RowWiseAdagrad's one number per row


def test_state_follows_the_optimizer():
    assert OptimizerKind.ADAM.state_per_row == (2, 0)
    assert OptimizerKind.PARTIAL_ROW_WISE_ADAM.state_per_row == (1, 1)
    assert OptimizerKind.ADAM.row_statistics == 0
    assert OptimizerKind.ROW_WISE_ADAGRAD.row_statistics == 1


def test_bad_tables_are_refused():
    with pytest.raises(ValueError, match=r"'t'.*0 rows.*x 4.*1"):
        Table(name="t", num_embeddings=0, embedding_dim=4)
    with pytest.raises(ValueError, match=r"'t'.*pooling_factors.*0"):
        Table(name="t", num_embeddings=1, embedding_dim=4, pooling_factors=(-1.0,))
    with pytest.raises(ValueError, match=r"'t'.*2.*num_poolings.*1.*pooling_factors"):
        Table(name="t", num_embeddings=1, embedding_dim=4, num_poolings=(1, 1))


def test_constraints_know_types_by_name_and_by_enum():
    constraints = ParameterConstraints(sharding_types=["row_wise", ShardingType.TABLE_WISE])
    assert constraints.allowed_types == {ShardingType.ROW_WISE, ShardingType.TABLE_WISE}
    assert ParameterConstraints().allowed_types == set(ShardingType)
    with pytest.raises(ValueError, match=r"'diagonal'.*\['data_parallel'"):
        ParameterConstraints(sharding_types=["diagonal"])
    with pytest.raises(ValueError, match=r"min_partition.*0.*1"):
        ParameterConstraints(min_partition=0)


def test_topology_fills_in_what_is_not_given():
    topology = Topology(world_size=16, hbm_cap=1000, reserve=0.25, dense_bytes=50)
    assert topology.local_size == 8
    assert topology.profile.name == "h100"
    assert topology.memory_cap == 700
    cpu = Topology(world_size=16, compute_device="cpu", ddr_cap=500, hbm_cap=7, intra_host_bandwidth=3.0)
    assert (cpu.local_size, cpu.profile.memory, cpu.profile.intra.all_to_all) == (16, 500, 3.0)


def test_topology_from_a_mesh():
    flat = Topology.from_mesh(FakeMesh(("shard",), (4,)))
    assert (flat.world_size, flat.local_size, flat.replicate, flat.sum_in_node) == (4, 4, (1,), False)
    mesh = FakeMesh(("replicate", "node", "local"), (2, 3, 4), "cuda")
    full = Topology.from_mesh(mesh)
    assert (full.world_size, full.local_size, full.replicate, full.sum_in_node) == (24, 4, (2,), True)
    with pytest.raises(ValueError, match=r"'dp'.*'shard'"):
        Topology.from_mesh(FakeMesh(("dp",), (4,)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size.*0.*1"),
        ({"world_size": 4, "local_world_size": 0}, "local_world_size.*0.*1"),
        ({"world_size": 4, "across_nodes": "bags"}, "across_nodes.*'bags'.*'sums'.*'rows'"),
        ({"world_size": 4, "across_nodes": "rows", "replicate": (1, 2)}, "replication"),
        ({"world_size": 4, "packed_ids": True}, "across_nodes.*'rows'"),
        ({"world_size": 4, "compute_device": "tpu"}, "compute_device.*'tpu'.*'cpu'.*'cuda'"),
        ({"world_size": 12}, "world_size.*12.*local_world_size.*8"),
        ({"world_size": 4, "reserve": 1.0}, r"reserve.*1.0.*\[0.*1"),
        ({"world_size": 4, "replicate": (3,)}, "size 3.*world_size.*4"),
    ],
)
def test_bad_topologies_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Topology(**arguments)
