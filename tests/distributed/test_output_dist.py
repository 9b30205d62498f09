import pytest
import torch

from meshrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.distributed.lookup_batch import SourceIds
from meshrec.distributed.output_dist import Codecs, Hop
from meshrec.distributed.pieces import Span
from meshrec.distributed.routing import RoutedTable, compile_plan
from meshrec.distributed.wire_codec import Codec
from meshrec.optim import SGD
from meshrec.plan.builders import WorldShape


def steps(forward, backward):
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t0", num_embeddings=10, embedding_dim=6, feature_names=["a"])]
    )
    env = default_env()
    plan = md.construct_module_sharding_plan(collection, {"t0": md.row_wise()}, world_size=env.shard.size)
    precision = md.CommsPrecision(getattr(torch, forward), getattr(torch, backward))
    module = md.EmbeddingBagCollectionSharder(SGD(lr=0.1), precision=precision).shard(collection, plan, env)
    features = KeyedJaggedTensor(["a"], torch.tensor([1, 7, 3]), lengths=torch.tensor([2, 1]))
    expected = collection(features).values()
    with md.measure_traffic() as traffic:
        values = module(features).values()
        values.square().sum().backward()
    return (values - expected).abs().max().item(), dict(traffic), values.dtype is torch.float32


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_halves_the_bytes(ranks, precision):
    error, traffic, is_full = ranks(2).run(steps, precision, precision)[0]
    exact, full, _ = ranks(2).run(steps, "float32", "float32")[0]
    assert exact < 1e-6 < error < 1e-2
    assert is_full
    for name in ("embeddings", "gradients of embeddings"):
        assert full[name] == 2 * traffic[name] == 2 * 6 * 4
    # Sizes, ids, embeddings, gradients: nothing else travels, whatever the plan.
    assert sorted(full) == ["embeddings", "gradients of embeddings", "ids", "sizes of ids"]


def gather_both_ways(dtype):
    """More rows than a kernel's chunk, columns in another order, a column that both ranks have, MEAN."""
    axis = default_env().world
    torch.manual_seed(0)
    spans = [[Span(0, 7, 5, 0), Span(0, 0, 3)], [Span(1, 7, 5, 0), Span(1, 3, 4)]]
    table = RoutedTable("t", 5, 12, ("a",))
    builder = md.table_wise(rank=0)("t", md.TableSize(5, 12), WorldShape(2, 2))
    routing = compile_plan([table], md.EmbeddingModuleShardingPlan({"t": builder}), num_ranks=2)
    wires = [md.CommsPrecision(dtype, dtype).formats]
    codecs = Codecs(*(Codec(routing, wires, way, int) for way in range(2)))
    hop = Hop.of(axis, spans, [], 12, codecs=codecs)
    rows = [201, 130]
    blocks = [torch.randn(count, hop.dims[axis.rank]).to(dtype) for count in rows]
    sent = torch.cat([block.view(-1) for block in blocks])
    offsets = torch.arange(rows[axis.rank] + 1) * 3
    source = SourceIds(torch.empty(0), offsets, None, 1, [0], torch.empty(0), [])
    read = hop.gather(hop.send(sent, rows, rows[axis.rank], "test"), None, rows[axis.rank], source)
    waited = hop.send(sent, rows, rows[axis.rank], "test")
    waited.wait()
    return torch.equal(hop.gather(waited, None, rows[axis.rank], source), read), read.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_same_read_where_they_lie(ranks, dtype):
    assert ranks(2).run(gather_both_ways, dtype) == [(True, True)] * 2
