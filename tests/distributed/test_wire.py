"""Wire formats in sharded modules: what they round, and what they send."""

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
from meshrec.comms.wire import FORMATS, WireFormat
from meshrec.optim import SGD
from meshrec.plan.mesh import default_env


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
WIRES = {**FORMATS, "scaled": SCALED}


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


@pytest.mark.parametrize("wire", ["fp16", "bf16", "scaled"])
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
            if "ids" in name or wire != "scaled":
                assert num_bytes == (traffic[name] if "ids" in name else 2 * traffic[name])
