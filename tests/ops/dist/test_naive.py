"""The compiled routing ops give exactly what the plain torch ones give; both are checked by hand on a small
plan.
"""

from itertools import accumulate

import pytest
import torch

from meshrec import distributed as md
from meshrec.distributed.pieces import as_tensor, local_spans, pieces_of, rank_spans
from meshrec.distributed.routing import RoutedTable, compile_plan
from meshrec.ops import operators
from meshrec.ops.dist import naive
from meshrec.plan.builders import WorldShape

COMPILED = operators
TABLES = [
    RoutedTable("t0", 10, 8, ("a", "b")),
    RoutedTable("t1", 7, 5, ("b",), True),
    RoutedTable("t2", 30, 4, ("c",)),
    RoutedTable("t3", 9, 6, ("a",)),
]
BUILDERS = [md.grid_shard(), md.row_wise(), md.column_wise(ranks=[1, 1, 0]), md.data_parallel()]
NUM_RANKS, NUM_KEYS = 4, 3


def make_routing(builders=BUILDERS):
    plan = {
        table.name: build(table.name, md.TableSize(table.num_rows, table.dim), WorldShape(NUM_RANKS, 2))
        for table, build in zip(TABLES, builders, strict=True)
    }
    return compile_plan(TABLES, md.EmbeddingModuleShardingPlan(plan), num_ranks=NUM_RANKS)


class Case:
    def __init__(self, ragged, dtype, weighted, seed=0):
        torch.manual_seed(seed)
        strides = [3, 5, 2] if ragged else [4] * NUM_KEYS
        lengths = torch.randint(0, 4, (sum(strides),))
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        self.values = torch.randint(0, 7, (int(lengths.sum()),)).to(dtype)
        self.weights = torch.rand(self.values.numel()) if weighted else None
        self.segments = torch.tensor([0, *accumulate(strides)]) if ragged else None
        self.routing = make_routing()
        self.keys = [{"a": 0, "b": 1, "c": 2}[use.feature] for use in self.routing.uses]

    def route(self, op, wide=False, check_ids=True):
        return op(
            self.values,
            self.offsets,
            self.weights,
            self.segments,
            NUM_KEYS,
            self.keys,
            self.routing.router,
            NUM_RANKS + 1,
            wide,
            check_ids,
            self.routing.names,
        )

    def bags(self):
        return self.offsets, self.segments, NUM_KEYS, self.keys


def assert_same(compiled, plain):
    for one, other in zip(compiled, plain, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ragged", [False, True])
def test_route_and_unpack(ragged, dtype, weighted, wide):
    case = Case(ragged, dtype, weighted)
    payload, header, counts, bad = case.route(COMPILED.route_ids, wide)
    assert_same((payload, header, counts, bad), case.route(naive.route_ids, wide))
    begin = 0
    for rank, work in enumerate([*case.routing.work, case.routing.local]):
        words = payload[begin : begin + int(header[rank, 1])]
        begin += words.numel()
        arguments = words, header[rank : rank + 1], [0], len(work.routes), weighted, wide
        unpacked = COMPILED.unpack_ids(*arguments)
        assert_same(unpacked, naive.unpack_ids(*arguments))
        values, offsets, _, segments = unpacked
        for number, route in enumerate(work.routes):
            low, high = offsets[segments[number : number + 2]].tolist()
            first, end = case.offsets[torch.tensor(_bag_bounds(case, route.use))].tolist()
            mine = case.values[first:end].long()
            mine = mine[(mine >= route.r0) & (mine < route.r1)] - route.r0
            assert torch.equal(values[low:high].long(), mine)


def _bag_bounds(case, use):
    key = case.keys[use]
    if case.segments is None:
        return [4 * key, 4 * key + 4]
    return case.segments[key : key + 2].tolist()


def test_blocks_come_in_the_order_asked_for():
    case = Case(False, torch.int64, False)
    payload, header, *_ = case.route(COMPILED.route_ids)
    words = payload[: int(header[0, 1])]
    twice = torch.cat([words, words + 0]), header[[0, 0]]
    arguments = *twice, [1, 0], len(case.routing.work[0].routes), False, False
    assert_same(COMPILED.unpack_ids(*arguments), naive.unpack_ids(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pooled_results_and_gradients(dtype):
    case = Case(False, torch.int64, False)
    routing = case.routing
    spans = [rank_spans(routing, rank) for rank in range(NUM_RANKS)]
    pieces = as_tensor(
        pieces_of([*spans, [span._replace(source=NUM_RANKS) for span in local_spans(routing)]])
    )
    dims, width = [work.dim for work in routing.work], routing.columns[-1]
    received, local = torch.rand(4 * sum(dims)).to(dtype), torch.rand(4, routing.local.dim)
    arguments = received, local, pieces, dims, 4, width, *case.bags()
    torch.testing.assert_close(COMPILED.gather_pooled(*arguments), naive.gather_pooled(*arguments))
    arguments = torch.rand(4, width), pieces, dims, routing.local.dim, *case.bags(), 0.5, dtype
    for one, other in zip(COMPILED.scatter_pooled(*arguments), naive.scatter_pooled(*arguments), strict=True):
        torch.testing.assert_close(one, other)


def sequence_arguments(case, counts):
    lookups, first = [], 0
    for work in case.routing.work:
        lookups += [[first + x.route, x.use, x.c0, x.width] for x in work.lookups]
        first += len(work.routes)
    dims = [
        0 if case.routing.replicated[use.table] else dim
        for use, dim in zip(case.routing.uses, case.routing.dims, strict=True)
    ]
    lookups = torch.tensor(lookups)
    size = int((counts[lookups[:, 0]] * lookups[:, 3]).sum())
    return (case.values, *case.bags(), case.routing.router, lookups, counts, dims), size


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sequence_results_and_gradients(dtype, ragged):
    case = Case(ragged, dtype, False)
    arguments, size = sequence_arguments(case, case.route(COMPILED.route_ids)[2])
    received = torch.rand(size)
    rows = COMPILED.gather_sequence(received, *arguments)
    assert torch.equal(rows, naive.gather_sequence(received, *arguments))
    assert torch.equal(COMPILED.scatter_sequence(rows, *arguments, 1.0, torch.float32), received)
    half = rows, *arguments, 0.5, torch.bfloat16
    assert torch.equal(COMPILED.scatter_sequence(*half), naive.scatter_sequence(*half))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gradients_of_weights(dtype, ragged):
    """Every route of an id brings 1, so each id gets the number of its routes."""
    case = Case(ragged, dtype, True)
    counts = case.route(COMPILED.route_ids)[2]
    arguments = case.values, *case.bags(), case.routing.router, counts
    received = torch.rand(int(counts.sum()))
    torch.testing.assert_close(
        COMPILED.gather_weight_grads(received, *arguments), naive.gather_weight_grads(received, *arguments)
    )
    ones = COMPILED.gather_weight_grads(torch.ones_like(received), *arguments)
    assert ones.sum() == counts.sum()
    for op in (COMPILED.gather_weight_grads, naive.gather_weight_grads):
        with pytest.raises(ValueError, match="received 3"):
            op(torch.rand(3), *arguments)


@pytest.mark.parametrize("route_ids", [COMPILED.route_ids, naive.route_ids])
def test_bad_ids_and_weights(route_ids):
    case = Case(False, torch.int64, True)
    case.values[int(case.offsets[5])] = 12
    message = r"table 't0': id 12 of feature 'b' \(sample \d\) is outside \[0, 10\)"
    with pytest.raises(ValueError, match=message):
        case.route(route_ids)
    counts = case.route(route_ids, check_ids=False)[3]
    assert counts.tolist() == [0, 1, 1, 0, 0]
    case = Case(False, torch.int64, True)
    case.weights[0] = torch.nan
    message = r"table 't0': the weight of id \d of feature 'a' \(sample \d\) is nan"
    with pytest.raises(ValueError, match=message):
        case.route(route_ids)
    case.offsets[-1] += 1
    with pytest.raises(ValueError, match="validate"):
        case.route(route_ids)


@pytest.mark.parametrize("ops", [COMPILED, naive])
def test_messages_that_do_not_fit(ops):
    case = Case(False, torch.int64, False)
    payload, header, *_ = case.route(COMPILED.route_ids)
    with pytest.raises(ValueError, match=r"header speaks of \d+ words, 3 were received"):
        ops.unpack_ids(payload[:3], header[:1], [0], 4, False, False)
    with pytest.raises(ValueError, match="received 3"):
        ops.gather_pooled(torch.rand(3), None, torch.zeros(0, 6, dtype=torch.long), [5], 4, 5, *case.bags())
    arguments, _ = sequence_arguments(case, case.route(COMPILED.route_ids)[2])
    with pytest.raises(ValueError, match="received 3"):
        ops.gather_sequence(torch.rand(3), *arguments)
    with pytest.raises(ValueError, match="float32"):
        ops.scatter_sequence(torch.rand(3), *arguments, 1.0, torch.float32)


@pytest.mark.threads
def test_results_do_not_depend_on_the_number_of_threads():
    case = Case(True, torch.int64, True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = case.route(COMPILED.route_ids)
        torch.set_num_threads(2)
        assert_same(one, case.route(COMPILED.route_ids))
    finally:
        torch.set_num_threads(before)
