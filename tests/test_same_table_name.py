"""Two modules of a model with a table of one name: planned, initialised, quantised and saved by path."""

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, Hashed, KeyedJaggedTensor, fuse
from meshrec import distributed as md
from meshrec.comms.wire import FULL_PRECISION
from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules import DataType
from meshrec.optim import SGD
from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology, estimate_from_batches
from meshrec.planner.module_tables import tables_of_model
from meshrec.quant import quantised_about, quantize, table_bytes

TOWERS = ("user", "item")


class Towers(torch.nn.Module):
    def __init__(self, names=("ids", "ids"), device="meta", **size):
        super().__init__()
        for tower, name in zip(TOWERS, names, strict=True):
            options = {"num_embeddings": 10} | size
            if "keys" in size:
                options.pop("num_embeddings")
            table = EmbeddingBagConfig(name=name, embedding_dim=4, feature_names=[tower], **options)
            setattr(self, tower, EmbeddingBagCollection([table], device=device))

    def forward(self, features):
        return torch.cat([self.user(features).values(), self.item(features).values()], 1)


def batch():
    ids = torch.arange(6)
    return KeyedJaggedTensor(list(TOWERS), torch.cat([ids, ids]), lengths=torch.ones(12, dtype=torch.int64))


def sharded(model):
    sharders = [md.EmbeddingBagCollectionSharder(SGD(lr=0.1))]
    return DistributedModelParallel(model, md.ShardingEnv.single_process(), sharders=sharders)


@pytest.mark.parametrize("size", [{}, {"keys": Hashed(max_rows=50)}])
def test_tables_of_one_name_begin_with_different_rows(size):
    found = sharded(Towers(**size))(batch()).detach()
    assert not torch.equal(found[:, :4], found[:, 4:])


def test_hashed_tables_of_one_name_begin_with_different_rows_when_fused():
    model = fuse(Towers(device="cpu", keys=Hashed(max_rows=50)), optimizer=SGD(lr=0.1))
    found = model(batch()).detach()
    assert not torch.equal(found[:, :4], found[:, 4:])
    assert torch.equal(found, sharded(Towers(keys=Hashed(max_rows=50)))(batch()).detach())


@pytest.mark.parametrize("size", [{}, {"keys": Hashed(max_rows=50)}])
def test_a_name_of_one_module_gives_the_rows_that_it_gives_alone(size):
    """Whatever other tables there are, and as in earlier releases."""
    torch.manual_seed(3)
    both = sharded(Towers(("ids", "others"), **size))(batch()).detach()
    torch.manual_seed(3)
    other = sharded(Towers(("ids", "more"), **size))(batch()).detach()
    assert torch.equal(both[:, :4], other[:, :4])


def planner(constraints):
    return EmbeddingShardingPlanner(Topology(world_size=2, compute_device="cpu"), constraints)


def test_constraints_name_a_table_by_its_path():
    wanted = ParameterConstraints(sharding_types=[ShardingType.ROW_WISE])
    plan = planner({"user.ids": wanted}).plan(Towers())
    assert plan.plan["user"]["ids"].sharding_type == ShardingType.ROW_WISE
    assert list(plan.plan) == ["user", "item"]
    with pytest.raises(ValueError, match=r"'ids'.*\['user.ids', 'item.ids'\]"):
        planner({"ids": wanted}).plan(Towers())


def test_estimates_are_of_each_module():
    assert list(estimate_from_batches(Towers(), [batch()])) == ["user.ids", "item.ids"]


def test_quantize_takes_paths_and_refuses_a_name_of_two_modules():
    model = Towers(device="cpu")
    small = quantize(model, DataType.FP32, per_table={"item.ids": DataType.INT8})
    assert [tower.embedding_bag_configs()[0].data_type for tower in (small.user, small.item)] == [
        DataType.FP32,
        DataType.INT8,
    ]
    assert table_bytes(small) == {"user.ids": 10 * 4 * 4, "item.ids": 10 * (4 + 4)}
    about = quantised_about(small)["tables"]
    assert {name: table["bytes"] for name, table in about.items()} == table_bytes(small)
    with pytest.raises(ValueError, match=r"'ids'.*\['user.ids', 'item.ids'\]"):
        quantize(model, per_table={"ids": DataType.INT8})


def test_optimizer_and_wire_formats_of_sharders_name_a_table_by_its_path():
    int8 = md.CommsPrecision("int8", "int8")
    sharder = md.EmbeddingBagCollectionSharder(
        SGD(lr=0.1), tables=["item.ids"], precision=md.CommsPrecision(tables={"user.ids": int8})
    )
    model = DistributedModelParallel(Towers(), md.ShardingEnv.single_process(), sharders=[sharder])
    assert list(model.fused_optimizer.params) == ["item.embedding_bags.ids.weight"]
    tables = tables_of_model(Towers(), [sharder])
    assert {table.name: table.wire for table in tables} == {
        "user.ids": int8.formats,
        "item.ids": FULL_PRECISION,
    }
    wires = model.sharded_modules["user"].built.options.wire, model.sharded_modules["item"].built.options.wire
    assert [wire.for_table("ids") for wire in wires] == [int8.formats, FULL_PRECISION]


@pytest.mark.parametrize(
    "options",
    [{"tables": ["ids"]}, {"precision": md.CommsPrecision(tables={"ids": md.CommsPrecision("int8")})}],
)
def test_sharder_options_refuse_a_name_of_two_modules(options):
    sharders = [md.EmbeddingBagCollectionSharder(SGD(lr=0.1), **options)]
    with pytest.raises(ValueError, match=r"'ids'.*\['user.ids', 'item.ids'\]"):
        DistributedModelParallel(Towers(), md.ShardingEnv.single_process(), sharders=sharders)


@pytest.mark.parametrize(
    "options",
    [{"tables": ["id"]}, {"precision": md.CommsPrecision(tables={"id": md.CommsPrecision("int8")})}],
)
def test_sharder_options_refuse_an_unknown_table(options):
    sharder = md.EmbeddingBagCollectionSharder(SGD(lr=0.1), **options)
    with pytest.raises(ValueError, match=r"'id'.*'more'.*'others'"):
        DistributedModelParallel(
            Towers(("more", "others")), md.ShardingEnv.single_process(), sharders=[sharder]
        )


def test_sharder_options_name_tables_of_one_of_two_modules():
    sharder = md.EmbeddingBagCollectionSharder(SGD(lr=0.1), tables=["more"])
    model = DistributedModelParallel(
        Towers(("more", "others")), md.ShardingEnv.single_process(), sharders=[sharder]
    )
    assert list(model.fused_optimizer.params) == ["user.embedding_bags.more.weight"]
