"""Random inputs for every op with a Triton kernel, on the CPU."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec import distributed as md
from meshrec.distributed.pieces import as_tensor, local_spans, pieces_of, rank_spans
from meshrec.distributed.routing import RoutedTable, compile_plan
from meshrec.ops.attention import naive as attention_naive
from meshrec.ops.dist import naive as dist_naive
from meshrec.ops.dist import wire_naive
from meshrec.ops.dist.wire_naive import BFLOAT16, HALF, INT4, INT8, STOCHASTIC
from meshrec.ops.nbit import naive as nbit_naive
from meshrec.ops.tbe.formulas import FORMULAS, Hyper
from meshrec.ops.tbe.layout import MEAN, NONE, SUM
from meshrec.plan.builders import WorldShape

ROWS, DIMS = (50, 9, 700), (4, 17, 64)
NUM_KEYS, KEYS, TABLES = 4, [2, 0, 2, 3], [0, 1, 1, 2]
NAMES = torch.tensor(list(b"t0\ta\nt1\tb\nt1\tc\nt2\td\n"), dtype=torch.uint8)
RANKS, SPREAD_TABLES = (
    4,
    [
        RoutedTable("t0", 10, 8, ("a", "b")),
        RoutedTable("t1", 7, 5, ("b",), True),
        RoutedTable("t2", 30, 4, ("c",)),
        RoutedTable("t3", 9, 6, ("a",)),
    ],
)
BUILDERS = [md.grid_shard(), md.row_wise(), md.column_wise(ranks=[1, 1, 0]), md.data_parallel()]


class Call(NamedTuple):
    """A call of an op, and which of its arguments it changes in place."""

    name: str
    op: str
    arguments: tuple[Any, ...]
    changed: tuple[int, ...] = ()


def lookups(
    batch: int, pooling: list[int], *, weighted: bool, dtype: torch.dtype, longest: int = 300
) -> tuple[Any, ...]:
    """Return the arguments that table-batched ops share, from values to flat. One bag is huge, most of it one
    ID; some are empty.
    """
    lengths = torch.randint(0, 6, (NUM_KEYS * batch,))
    lengths[-1] = longest
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    limit = torch.tensor([ROWS[1], 1, min(ROWS[0], ROWS[1]), ROWS[2]]).repeat_interleave(batch)
    values = (torch.rand(int(lengths.sum())) * limit.repeat_interleave(lengths)).to(dtype)
    values[-longest * 3 // 4 :] = 5
    weights = torch.rand(values.numel()) if weighted else None
    return values, offsets.to(dtype), weights, None, NUM_KEYS, KEYS, TABLES, pooling, NONE in pooling


def output_shape(shared: tuple[Any, ...]) -> list[int]:
    """Rows and columns of a pooled result, or the elements of a flat one."""
    _, offsets, *_, pooling, flat = shared
    batch, dims = (offsets.numel() - 1) // NUM_KEYS, [DIMS[table] for table in TABLES]
    if not flat:
        return [batch, sum(dims)]
    starts = offsets.long()[:: max(batch, 1)]
    rows = [
        int(starts[key + 1] - starts[key]) if way == NONE else batch
        for key, way in zip(KEYS, pooling, strict=True)
    ]
    return [sum(number * dim for number, dim in zip(rows, dims, strict=True))]


def tbe_calls(*, quick: bool = False) -> Iterator[Call]:
    """Calls of the table-batched ops. ``quick``: small ones, and each optimizer for one dtype only."""
    dims, rows = [DIMS[table] for table in TABLES], list(ROWS)
    variants = (
        ([SUM, MEAN, SUM, MEAN], False, torch.int64, torch.float32),
        ([SUM] * 4, True, torch.int32, torch.float16),
        ([NONE] * 4, False, torch.int64, torch.bfloat16),
    )
    for number, (ways, weighted, ids, dtype) in enumerate(variants):
        size, longest = (4, 40) if quick else (16, 300)
        shared = lookups(size, ways, weighted=weighted, dtype=ids, longest=longest)
        weights = [torch.randn(height, dim).to(dtype) for height, dim in zip(ROWS, DIMS, strict=True)]
        shape = output_shape(shared)
        grad = torch.randint(-16, 17, shape) / 8
        what = f"{dtype}, {'weighted' if weighted else 'sequences' if shared[-1] else 'pooled'}"
        yield Call(f"lookup, {what}", "tbe_forward", (weights, *shared, shape[0], torch.float32, True, NAMES))
        yield Call(f"sparse gradient, {what}", "tbe_sparse_grad", (grad, *shared, dims, rows))
        yield Call(f"dense gradient, {what}", "tbe_dense_grad", (grad, weights, *shared, dims))
        for formula in FORMULAS[number :: len(variants)] if quick else FORMULAS:
            state = [
                torch.rand(weight.shape[: 2 - slot.per_row]) for slot in formula.slots for weight in weights
            ]
            hyper = Hyper(
                lr=0.1,
                eps=1e-6,
                weight_decay=0.02,
                decay_mode=formula.code % 3,
                beta1=0.9,
                beta2=0.99,
                momentum=0.8,
                trust_coefficient=0.5,
                beta=0.3,
                l1=0.2,
                l2=0.1,
                step=3,
                seed=7,
            ).as_tensor()
            arguments = (grad, *shared, dims, weights, state, formula.code, hyper, None, [])
            yield Call(f"update {formula.code}, {what}", "tbe_update", arguments, (11, 12))


def nbit_calls(*, quick: bool = False) -> Iterator[Call]:
    size, longest = (4, 40) if quick else (16, 300)
    shared = lookups(size, [SUM] * 4, weighted=True, dtype=torch.int64, longest=longest)
    dims = [DIMS[table] for table in TABLES]
    for bits in ([8, 4, 2], [0, 8, 4]):
        weights = [torch.randn(height, dim) for height, dim in zip(ROWS, DIMS, strict=True)]
        rows = [
            w if own == 0 else nbit_naive.nbit_quantize(w, own, None)
            for w, own in zip(weights, bits, strict=True)
        ]
        options = (output_shape(shared)[0], torch.float32, True, NAMES)
        yield Call(f"quantised lookup, {bits}", "nbit_forward", (rows, bits, *shared, dims, *options))


def wire_calls() -> Iterator[Call]:
    """Calls that encode and decode rows of every format, alone and side by side."""
    for dim in (1, 16, 77, 130):
        formats = [HALF, BFLOAT16, INT8, INT4, INT8 | STOCHASTIC, INT4 | STOCHASTIC]
        count, columns = [40, 3], 2 * len(formats)
        values = torch.randn(sum(count) * len(formats) * dim) * 10.0 ** torch.randint(-3, 3, (1,))
        layout = (count, [0, len(formats), columns], [dim] * columns, 2 * formats)
        noise = (list(range(columns)), [3] * columns, [1 << 40] * columns, torch.arange(sum(count)) * 3, 7)
        yield Call(f"encoding, width {dim}", "wire_encode", (values, *layout, *noise))
        message, _ = wire_naive.wire_encode(values, *layout, *noise)
        yield Call(f"decoding, width {dim}", "wire_decode", (message, *layout))


def attention_calls(*, quick: bool = False) -> Iterator[Call]:
    """Calls with both kinds of weights, all masks and biases, targets, and histories without some queries."""
    longest = 70 if quick else 700
    masks = [(True, 0, 0), (False, 0, 3), (True, 5, 2), (False, 40, 0)]
    sizes = [(1, 64, 64), (2, 17, 70), (4, 32, 8), (1, 128, 128)]
    for number, (mask, (heads, width, value_width)) in enumerate(zip(masks, sizes, strict=True)):
        lengths = torch.tensor([0, 1, longest, 65, 64, longest // 3])
        num_queries = lengths if number % 2 else (lengths * 0.7).long()
        targets = (lengths - 4).clamp(min=0) // 3
        offsets, query_offsets = (
            torch.cat([torch.zeros(1, dtype=torch.int64), each.cumsum(0)]) for each in (lengths, num_queries)
        )
        count, max_length = int(lengths.sum()), longest + 2
        query = torch.randn(int(num_queries.sum()), heads, width)
        key, value = torch.randn(count, heads, width), torch.randn(count, heads, value_width)
        biases = (torch.randn(2 * max_length - 1), torch.randn(129), torch.randint(0, 10**9, (count,)))
        for softmax in (False, True):
            own = biases if softmax == (number % 2 == 0) else (None, None, None)
            options = (offsets, query_offsets, targets, *own, max_length, width**-0.5, softmax, *mask)
            what = f"{mask=}, {softmax=}, {heads} heads of {width} and {value_width}"
            yield Call(f"attention, {what}", "jagged_attention", (query, key, value, *options))
            out, log_sums = attention_naive.jagged_attention(query, key, value, *options)
            grad = torch.randn(out.shape) / len(out) ** 0.5
            back = (grad, out, log_sums, query, key, value, *options)
            yield Call(f"gradients of attention, {what}", "jagged_attention_grad", back)


def dist_calls(*, ragged: bool, weighted: bool, wide: bool, batch: int = 64) -> Iterator[Call]:
    plan = {
        table.name: build(table.name, md.TableSize(table.num_rows, table.dim), WorldShape(RANKS, 2))
        for table, build in zip(SPREAD_TABLES, BUILDERS, strict=True)
    }
    routing = compile_plan(SPREAD_TABLES, md.EmbeddingModuleShardingPlan(plan), num_ranks=RANKS)
    strides = [batch, batch + 2, batch - 1] if ragged else [batch] * 3
    lengths = torch.randint(0, 5, (sum(strides),))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randint(0, 7, (int(lengths.sum()),))
    weights = torch.rand(values.numel()) if weighted else None
    segments = torch.tensor([0, *torch.tensor(strides).cumsum(0).tolist()]) if ragged else None
    keys = [{"a": 0, "b": 1, "c": 2}[use.feature] for use in routing.uses]
    bags, what = (offsets, segments, 3, keys), f"{ragged=}, {weighted=}, {wide=}"
    route = (
        values,
        offsets,
        weights,
        segments,
        3,
        keys,
        routing.router,
        RANKS + 1,
        wide,
        True,
        routing.names,
    )
    yield Call(f"routing, {what}", "route_ids", route)
    payload, header, counts, _ = dist_naive.route_ids(*route)
    begins = [0, *header[:, 1].cumsum(0).tolist()]
    for rank, work in enumerate(routing.work):
        words = payload[begins[rank] : begins[rank + 1]]
        unpack = (torch.cat([words, words]), header[[rank, rank]], [1, 0], len(work.routes), weighted, wide)
        yield Call(f"unpacking, {what}", "unpack_ids", unpack)
    received = torch.rand(int(counts.sum()))
    yield Call(
        f"weight gradients, {what}", "gather_weight_grads", (received, values, *bags, routing.router, counts)
    )
    rows, first = [], 0
    for work in routing.work:
        rows += [[first + x.route, x.use, x.c0, x.width] for x in work.lookups]
        first += len(work.routes)
    dims = [
        0 if routing.replicated[use.table] else dim
        for use, dim in zip(routing.uses, routing.dims, strict=True)
    ]
    table = torch.tensor(rows)
    received = torch.rand(int((counts[table[:, 0]] * table[:, 3]).sum()))
    sequence = (values, *bags, routing.router, table, counts, dims)
    yield Call(f"rows of sequences, {what}", "gather_sequence", (received, *sequence))
    yield Call(
        f"gradients of sequences, {what}", "scatter_sequence", (received, *sequence, 0.5, torch.float16)
    )
    if ragged:
        return
    spans = [rank_spans(routing, rank) for rank in range(RANKS)]
    local = [span._replace(source=RANKS) for span in local_spans(routing)]
    pieces, widths = as_tensor(pieces_of([*spans, local])), [work.dim for work in routing.work]
    size, here = batch * sum(widths), torch.rand(batch, routing.local.dim)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        pooled = (torch.rand(size).to(dtype), here, pieces, widths, batch, routing.columns[-1], *bags)
        yield Call(f"pooled rows, {dtype}", "gather_pooled", pooled)
        grad = torch.rand(batch, routing.columns[-1])
        back = (grad, pieces, widths, routing.local.dim, *bags, 0.5, dtype)
        yield Call(f"pooled gradients, {dtype}", "scatter_pooled", back)


def moved(arguments: Any, device: torch.device, op: str) -> Any:
    """Return the arguments on the device; what the ops take on the host stays there."""
    # Plans, counts and headers are read on the host; see the docstrings of naive.py.
    on_host = {
        "route_ids": {3, 6, 10},
        "unpack_ids": {1},
        "gather_pooled": {2, 7},
        "scatter_pooled": {1, 5},
        "gather_sequence": {3, 6, 7, 8},
        "scatter_sequence": {3, 6, 7, 8},
        "gather_weight_grads": {3, 6, 7},
        "tbe_forward": {13},
        "tbe_update": {14},
        "nbit_forward": {15},
    }.get(op, set())
    return tuple(each if at in on_host else _moved(each, device) for at, each in enumerate(arguments))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [each.to(device, copy=True) for each in value]
    return value
