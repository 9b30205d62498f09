import torch

from meshrec import distributed as md
from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.lookup_batch import LookupIds
from meshrec.distributed.routing import RoutedTable, compile_plan
from meshrec.ops import tbe
from meshrec.plan.builders import WorldShape
from meshrec.tables.dense.rows import DenseRows
from meshrec.tables.local_shards import LocalShards, parameter_shard
from meshrec.tables.packing import Packing


def lookup_tables(sequence):
    torch.manual_seed(0)
    tables = [RoutedTable("t0", 4, 2, ("a", "b"), True), RoutedTable("t1", 4, 3, ("a",))]
    size = {table.name: md.TableSize(table.num_rows, table.dim) for table in tables}
    plan = {name: md.table_wise(rank=0)(name, size[name], WorldShape(1, 1)) for name in size}
    routing = compile_plan(tables, md.EmbeddingModuleShardingPlan(plan), num_ranks=1)
    weights = [torch.nn.Parameter(torch.rand(table.num_rows, table.dim)) for table in tables]
    packings = [Packing([rectangle], DenseRows(torch.float32)) for rectangle in routing.work[0].rectangles]
    held = LocalShards([parameter_shard(*each, [[]], None) for each in zip(weights, packings, strict=True)])
    return LookupTables(routing, routing.work[0], held, sequence=sequence), weights


# Two ranks asked: one for two samples, the other for one; three routes (a in t0, b in t0, a in t1).
IDS = LookupIds(
    torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 3, 1, 1], dtype=torch.int32),
    torch.tensor([0, 1, 3, 4, 4, 5, 7, 9, 10, 11]),
    None,
    torch.tensor([0, 2, 4, 6, 7, 8, 9]),
    [2, 1],
    False,
)


def test_blocks_of_pooled_rows():
    tables, (t0, t1) = lookup_tables(sequence=False)
    assert tables.block_sizes(IDS) == [2 * 7, 7]
    out = tables.forward(IDS, 21)
    expected = torch.stack(
        [
            torch.cat([t0[0], t0[3], t1[0]]),
            torch.cat([(t0[1] + t0[2]) / 2, torch.zeros(2), t1[1] + t1[2]]),
            torch.cat([t0[3], t0[1], t1[1]]),
        ]
    )
    torch.testing.assert_close(out, expected)


def test_blocks_of_sequences():
    tables, (t0, t1) = lookup_tables(sequence=True)
    assert tables.block_sizes(IDS._replace(elements=(17, 9))) == [17, 9]  # as their messages say
    out = tables.forward(IDS, 26)
    torch.testing.assert_close(out[:6], t0[:3].reshape(-1))
    torch.testing.assert_close(out[-3:], t1[1])


def test_gradients_of_rows():
    tables, weights = lookup_tables(sequence=False)
    grad, lookups = torch.rand(3, 7), tables.lookups(IDS)
    dense = tbe.dense_grad(grad, weights, lookups)
    for part, whole, weight in zip(tables.sparse_grads(grad, IDS, [0, 1]), dense, weights, strict=True):
        assert torch.equal(torch.zeros_like(weight).index_copy(0, part.rows, part.grads), whole)
    assert tbe.dense_grad(grad, weights[1:], lookups.of_tables([1]))[0].shape == (4, 3)
    squares, counts, _ = tbe.row_squares(grad, lookups, [4, 4])
    expected = [part.grads.square().sum(1) for part in tables.sparse_grads(grad, IDS, [0, 1])]
    torch.testing.assert_close(squares, torch.cat(expected))
    assert counts.tolist() == [len(part) for part in expected]
