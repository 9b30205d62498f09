"""Wire formats in sharded modules: what they round, and what they send."""

import itertools
import os

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import override

from meshrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.comms.wire import FORMATS, WireFormat
from meshrec.distributed import id_exchange
from meshrec.optim import SGD
from meshrec.planner import Topology
from meshrec.planner.evaluate import evaluate
from meshrec.planner.module_tables import tables_of_model
from meshrec.planner.types import ParameterConstraints


class ScaledRows(WireFormat):
    """One signed byte per value, after the row's fp32 scale: no cast, so that whatever assumes one fails."""

    name = "scaled"
    unit = torch.uint8
    kernel_dtype = torch.float32
    value_bytes = 1
    row_overhead = 4

    @override
    def encode(self, rows: Tensor) -> Tensor:
        scales = rows.abs().amax(1, keepdim=True).float() / 127
        codes = (rows / torch.where(scales > 0, scales, 1)).round().to(torch.int8)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], 1)

    @override
    def decode(self, message: Tensor, dim: int) -> Tensor:
        scales = message[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return scales * message[:, 4:].contiguous().view(torch.int8)

    @override
    def error_bound(self, largest: float) -> float:
        return largest / 127 / 2 * (1 + 1e-5)


SCALED = ScaledRows()
WIRES = {name: FORMATS[name] for name in ("fp32", "fp16", "bf16", "int8")} | {"scaled": SCALED}


def _flat(output):
    return torch.cat([each.values().flatten() for each in output.values()])


def trained(kind, wire):
    """Two tables after a step with gradients that a half rounds, what was looked up, and the bytes by
    collective.
    """
    torch.manual_seed(0)
    sequence = kind == "sequence"
    configs = [
        (EmbeddingConfig if sequence else EmbeddingBagConfig)(
            name=f"t{number}", num_embeddings=12, embedding_dim=dim, feature_names=features
        )
        for number, (dim, features) in enumerate([(6, ["a", "b"]), (10, ["b"])])
    ]
    module = (EmbeddingCollection if sequence else EmbeddingBagCollection)(tables=configs)
    env = default_env()
    if kind == "nodes":
        env = md.ShardingEnv.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local")))
    plan = md.construct_module_sharding_plan(
        module,
        {"t0": md.row_wise(), "t1": md.column_wise(ranks=[0, 1])},
        world_size=env.shard.size,
        local_size=env.local_size,
    )
    sharder = (md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder)(
        SGD(lr=1.0), precision=md.CommsPrecision(WIRES[wire], WIRES[wire])
    )
    sharded = sharder.shard(module, plan, env)
    lengths = torch.tensor([2, 2, 0, 3] if env.shard.rank else [2, 2, 1, 0])
    ids = torch.tensor([1, 7, 3, 10, 11, 2, 2])[: lengths.sum()]
    with md.measure_traffic() as traffic:
        output = sharded(KeyedJaggedTensor(["a", "b"], ids, lengths=lengths))
        values = (
            torch.cat([each.values().flatten() for each in output.values()]) if sequence else output.values()
        )
        values.mul(1.001 + torch.arange(values.numel()).view_as(values) / 1000).sum().backward()
    collection = sharded.embeddings if sequence else sharded.embedding_bags
    weights = [shard.detach().flatten() for name in ("t0", "t1") for shard in collection[name].shards()]
    return torch.cat(weights), values.detach().flatten(), dict(traffic)


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8", "scaled"])
@pytest.mark.parametrize("kind", ["pooled", "sequence", "nodes"])
def test_every_format_keeps_its_bound_in_modules(ranks, kind, wire):
    pool = ranks(4 if kind == "nodes" else 2)
    for exact, coded in zip(pool.run(trained, kind, "fp32"), pool.run(trained, kind, wire), strict=True):
        (weights, values, full_traffic), (coded_weights, coded_values, traffic) = exact, coded
        bound = WIRES[wire].error_bound
        # Row parts of up to four ranks are summed, between nodes after a second rounding of the sums.
        parts = 4 * bound(values.abs().max().item()) * (2 if kind == "nodes" else 1)
        assert 0 < (values - coded_values).abs().max() <= parts
        assert 0 < (weights - coded_weights).abs().max() <= 20 * bound(1.2)
        for name, num_bytes in full_traffic.items():
            if "ids" in name or wire not in ("int8", "scaled"):
                assert num_bytes == (traffic[name] if "ids" in name else 2 * traffic[name])


KINDS = {
    "table_wise": (md.table_wise(rank=1), md.table_wise(rank=0)),
    "column_wise": (md.column_wise(ranks=[1, 0]), md.column_wise(ranks=[0, 1])),
    "row_wise": (md.row_wise(), md.row_wise()),
    "table_row_wise": (md.table_row_wise(node=0), md.table_row_wise(node=0)),
    "table_column_wise": (md.table_column_wise(node=0), md.table_column_wise(node=0)),
    "grid_shard": (md.grid_shard(), md.grid_shard()),
    "data_parallel": (md.data_parallel(), md.data_parallel()),
}
WIRES["int4"] = FORMATS["int4"]
PAIRS = [(each, each) for each in WIRES if each != "int4"]
PAIRS += [("fp16", "scaled"), ("scaled", "bf16"), ("int4", "int8")]
LEVELS = ["one level", "sums", "rows", "packed"]
NUM_ROWS, BATCH, REPEATS = 16, 4, 20
SENT = {
    "ids": ("ids", "ids between nodes"),
    "output": ("embeddings", "embeddings between nodes"),
    "gradient": ("gradients of embeddings", "gradients between nodes"),
}


def collection_of(sequence):
    kind = EmbeddingConfig if sequence else EmbeddingBagConfig
    configs = [
        kind(name="t0", num_embeddings=NUM_ROWS, embedding_dim=8, feature_names=["a", "b"]),
        kind(name="t1", num_embeddings=NUM_ROWS, embedding_dim=12, feature_names=["b"]),
    ]
    return (EmbeddingCollection if sequence else EmbeddingBagCollection)(tables=configs)


def plan_of(kind, sequence, num_ranks, local_size):
    builders = dict(zip(("t0", "t1"), KINDS[kind], strict=True))
    return md.construct_module_sharding_plan(
        collection_of(sequence), builders, world_size=num_ranks, local_size=local_size
    )


def drawn_pairs(sequence, level):
    """A third of all kinds with pairs of formats, another in each test. With MESHREC_THOROUGH, all."""
    pairs, first = [*itertools.product(KINDS, PAIRS)], (LEVELS.index(level) + sequence) % 3
    return pairs if "MESHREC_THOROUGH" in os.environ else pairs[first::3]


def sent(sequence, level):
    """Bytes that this rank sends in a step, by kind and pair of formats, see ``SENT``."""
    env = default_env()
    if level != "one level":
        env = md.ShardingEnv.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local")))
    # Every row as often as any other, so that parts of equal heights have equally many IDs, and so often that
    # even drawn IDs would contain every row.
    features = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(NUM_ROWS).repeat(2 * REPEATS),
        lengths=torch.full((2 * BATCH,), REPEATS * NUM_ROWS // BATCH),
    )
    across_nodes = "rows" if level in ("rows", "packed") else "sums"
    measured = id_exchange.is_faster
    id_exchange.is_faster = lambda *_: level == "packed"
    try:
        return _sent(sequence, env, features, across_nodes, drawn_pairs(sequence, level))
    finally:
        id_exchange.is_faster = measured


def _sent(sequence, env, features, across_nodes, pairs):
    found = {}
    for kind, (forward, backward) in pairs:
        plan = plan_of(kind, sequence, env.shard.size, env.local_size)
        sharder = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
        precision = md.CommsPrecision(WIRES[forward], WIRES[backward])
        module = sharder(SGD(lr=0.1), precision=precision, across_nodes=across_nodes).shard(
            collection_of(sequence), plan, env
        )
        module(features)  # decides whether IDs are packed
        with md.measure_traffic() as traffic:
            output = module(features)
            values = [each.values() for each in output.values()] if sequence else [output.values()]
            torch.cat([each.flatten() for each in values]).sum().backward()
        counts = [sum(traffic[name] for name in names) for names in SENT.values()]
        found[kind, forward, backward] = counts
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sequence", [False, True])
def test_predicted_bytes_are_those_that_are_sent(ranks, sequence, level):
    num_ranks, local_size = (2, 2) if level == "one level" else (4, 2)
    by_rank = ranks(num_ranks).run(sent, sequence, level)
    bag = float(REPEATS * NUM_ROWS // BATCH)
    constraints = {
        "t0": ParameterConstraints(pooling_factors=[bag, bag]),
        "t1": ParameterConstraints(pooling_factors=[bag]),
    }
    topology = Topology(
        world_size=num_ranks,
        local_world_size=local_size,
        compute_device="cpu",
        sum_in_node=level == "sums",
        across_nodes="rows" if level in ("rows", "packed") else "sums",
        packed_ids=level == "packed",
    )
    for (kind, forward, backward), counts in by_rank[0].items():
        wire = md.CommsPrecision(WIRES[forward], WIRES[backward]).formats
        tables = tables_of_model(collection_of(sequence), None, constraints, default_wire=wire)
        plan = {"": plan_of(kind, sequence, num_ranks, local_size)}
        predicted = evaluate(plan, tables, topology, batch_size=BATCH).sent_bytes
        measured = [sum(each[kind, forward, backward][way] for each in by_rank) for way in range(len(SENT))]
        assert dict(zip(SENT, measured, strict=True)) == predicted, (kind, forward, backward)
        assert any(counts) == (kind != "data_parallel")
