"""The Triton kernels of the table-batched lookups and their update; ``triton.py`` launches them.

A lookup is one feature's part of one block, described by ``LOOKUP_FIELDS`` numbers. What an id of a lookup
adds to a gradient is an entry: its row (counted through all tables), where its gradient begins, and its
factor. Entries sorted by row make runs, and the first entry of a run sums it and writes the row.
"""

# ruff: noqa: SIM300 - constants of the compiler are in capitals
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

import triton
import triton.language as tl

LOOKUP_FIELDS = 7
"""table, width, first bag, bags, first element of the output, elements between its rows, pooling."""
TABLE_FIELDS = 7
"""Addresses of the weight and two state slots; width; first row, counted through all tables; origin."""

_MEAN: tl.constexpr = tl.constexpr(1)
_NONE: tl.constexpr = tl.constexpr(2)
_L2: tl.constexpr = tl.constexpr(1)
_DECOUPLED: tl.constexpr = tl.constexpr(2)
SGD: tl.constexpr = tl.constexpr(0)
ADAGRAD: tl.constexpr = tl.constexpr(1)
ROWWISE_ADAGRAD: tl.constexpr = tl.constexpr(2)
ADAM: tl.constexpr = tl.constexpr(3)
PARTIAL_ROWWISE_ADAM: tl.constexpr = tl.constexpr(4)
LAMB: tl.constexpr = tl.constexpr(5)
PARTIAL_ROWWISE_LAMB: tl.constexpr = tl.constexpr(6)
LARS: tl.constexpr = tl.constexpr(7)


@triton.jit
def check(lookups, num_rows, ids, offsets, sample_weights, is_bad, WEIGHTED: tl.constexpr):
    """Sets is_bad if an id is outside its table or has a NaN weight."""
    fields = lookups + tl.program_id(1) * 7
    bag = tl.program_id(0)
    if bag >= tl.load(fields + 3):
        return
    rows = tl.load(num_rows + tl.load(fields))
    at = offsets + tl.load(fields + 2) + bag
    for i in range(tl.load(at), tl.load(at + 1)):
        row = tl.load(ids + i).to(tl.int64)
        bad = (row < 0) | (row >= rows)
        if WEIGHTED:
            weight = tl.load(sample_weights + i)
            bad = bad | (weight != weight)
        if bad:
            tl.store(is_bad, 1)


@triton.jit
def look_up(
    lookups,
    addresses,
    ids,
    offsets,
    sample_weights,
    out,
    WEIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One bag of one lookup: its pooled row, or all its rows where nothing is pooled."""
    fields = lookups + tl.program_id(1) * 7
    bag = tl.program_id(0)
    if bag >= tl.load(fields + 3):
        return
    width, stride, pooling = tl.load(fields + 1), tl.load(fields + 5), tl.load(fields + 6)
    first_bag = tl.load(fields + 2)
    table = tl.load(addresses + tl.load(fields)).to(tl.pointer_type(WEIGHT))
    target = out + tl.load(fields + 4)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    begin, end = tl.load(offsets + first_bag + bag), tl.load(offsets + first_bag + bag + 1)
    if pooling == _NONE:
        first_id = tl.load(offsets + first_bag)
        for i in range(begin, end):
            row = table + tl.load(ids + i).to(tl.int64) * width
            x = tl.load(row + columns, inside).to(tl.float32)
            place = target + (i - first_id).to(tl.int64) * stride
            tl.store(place + columns, x.to(out.dtype.element_ty), inside)
    else:
        total = tl.zeros([BLOCK], tl.float32)
        for i in range(begin, end):
            row = table + tl.load(ids + i).to(tl.int64) * width
            x = tl.load(row + columns, inside, 0.0).to(tl.float32)
            if WEIGHTED:
                x *= tl.load(sample_weights + i)
            total += x
        if pooling == _MEAN:
            total = total / tl.maximum(end - begin, 1).to(tl.float32)
        place = target + bag.to(tl.int64) * stride
        tl.store(place + columns, total.to(out.dtype.element_ty), inside)


@triton.jit
def list_entries(
    lookups,
    places,
    tables,
    ids,
    offsets,
    sample_weights,
    rows,
    starts,
    factors,
    tables_of,
    WEIGHTED: tl.constexpr,
):
    """The entries of one bag of one lookup, the id ``i`` at ``places[lookup] + i``."""
    lookup = tl.program_id(1)
    fields = lookups + lookup * 7
    bag = tl.program_id(0)
    if bag >= tl.load(fields + 3):
        return
    table, stride, pooling = tl.load(fields), tl.load(fields + 5), tl.load(fields + 6)
    first_bag, target = tl.load(fields + 2), tl.load(fields + 4)
    first_row = tl.load(tables + table * 7 + 4)
    begin, end = tl.load(offsets + first_bag + bag), tl.load(offsets + first_bag + bag + 1)
    first_id = tl.load(offsets + first_bag)
    entries = tl.load(places + lookup)
    shared = 1.0
    if pooling == _MEAN:
        shared = 1.0 / tl.maximum(end - begin, 1).to(tl.float32)
    for i in range(begin, end):
        place = entries + i
        tl.store(rows + place, first_row + tl.load(ids + i).to(tl.int64))
        tl.store(tables_of + place, table.to(tl.int32))
        factor = shared
        if WEIGHTED:
            factor = shared * tl.load(sample_weights + i)
        tl.store(factors + place, factor)
        if pooling == _NONE:
            tl.store(starts + place, target + (i - first_id).to(tl.int64) * stride)
        else:
            tl.store(starts + place, target + bag.to(tl.int64) * stride)


@triton.jit
def _is_first(rows, at):
    row = tl.load(rows + at)
    return (at == 0) | (tl.load(rows + tl.maximum(at - 1, 0)) != row)


@triton.jit
def _sum_run(grad, rows, order, starts, factors, at, num_entries, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    row = tl.load(rows + at)
    last = at
    while (last < num_entries) & (tl.load(rows + tl.minimum(last, num_entries - 1)) == row):
        entry = tl.load(order + last)
        x = tl.load(grad + tl.load(starts + entry) + columns, inside, 0.0).to(tl.float32)
        total += x * tl.load(factors + entry)
        last += 1
    return total


@triton.jit
def sum_runs(
    grad,
    rows,
    order,
    starts,
    factors,
    tables_of,
    tables,
    numbers,
    num_entries,
    end_of_rows,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the sums of runs to the tables' first state slot, and their rows to the second (not DENSE).

    ``numbers``: the number of each entry's run within its table; DENSE: the row itself counts.
    """
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    if row >= end_of_rows:
        return
    if not _is_first(rows, at):
        return
    fields = tables + tl.load(tables_of + tl.load(order + at)) * 7
    width = tl.load(fields + 3)
    total = _sum_run(grad, rows, order, starts, factors, at, num_entries, width, BLOCK)
    columns = tl.arange(0, BLOCK)
    local = row - tl.load(fields + 4)
    if DENSE:
        place = local
    else:
        place = tl.load(numbers + at)
        tl.store(tl.load(fields + 2).to(tl.pointer_type(tl.int64)) + place, local)
    sums = tl.load(fields + 1).to(tl.pointer_type(tl.float32))
    tl.store(sums + place * width + columns, total, columns < width)


@triton.jit
def _random_bits(seed, step, row, columns):
    """16 bits for every column; see ``naive_update.random_bits``. Products wrap, as those of uint64 do."""
    x = row * -7046029254386353131 + columns * -4417276706812531889
    x += seed * 1609587929392839161 + step * 2870177450012600261
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return ((x ^ ((x >> 31) & 0x1FFFFFFFF)) & 0xFFFF).to(tl.int32)


@triton.jit
def _rounded(x, bits, STOCHASTIC: tl.constexpr, WEIGHT: tl.constexpr):
    """To the nearest, or up or down with a chance by nearness; see ``naive_update.stochastic_round``."""
    raw = x.to(tl.int32, bitcast=True)
    if WEIGHT == tl.bfloat16:
        if not STOCHASTIC:
            bits = 0x7FFF + ((raw >> 16) & 1)
        raw = (raw + bits) & -65536
        inside = (tl.abs(x) < float("inf")) & (x == x)
    else:
        raw = (raw + (bits & 0x1FFF)) & -8192
        inside = (tl.abs(x) >= 0.00006103515625) & (tl.abs(x) <= 65504.0) & STOCHASTIC
    return tl.where(inside, raw.to(tl.float32, bitcast=True), x).to(WEIGHT)


@triton.jit
def update_runs(
    grad,
    rows,
    order,
    starts,
    factors,
    tables_of,
    tables,
    row_stats,
    num_entries,
    end_of_rows,
    lr,
    eps,
    weight_decay,
    beta1,
    beta2,
    momentum,
    trust,
    correction1,
    correction2,
    row_dim,
    counters,
    OPTIMIZER: tl.constexpr,
    DECAY: tl.constexpr,
    STATS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Steps the row of one run; the formulas are those of ``naive_update.py``.

    ``counters``: seed and step.
    """
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    if row >= end_of_rows:
        return
    if not _is_first(rows, at):
        return
    entry = tl.load(order + at)
    fields = tables + tl.load(tables_of + entry) * 7
    width = tl.load(fields + 3)
    row -= tl.load(fields + 4)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    g = _sum_run(grad, rows, order, starts, factors, at, num_entries, width, BLOCK)
    target = tl.load(fields).to(tl.pointer_type(WEIGHT)) + row * width + columns
    slot0 = tl.load(fields + 1).to(tl.pointer_type(tl.float32))
    slot1 = tl.load(fields + 2).to(tl.pointer_type(tl.float32))
    w = tl.load(target, inside, 0.0).to(tl.float32)
    if (DECAY == _L2) & (OPTIMIZER != LARS):
        g += weight_decay * w
    kept = w
    if DECAY == _DECOUPLED:
        kept = w * (1 - lr * weight_decay)

    g_square = tl.sum(g * g, 0)
    if STATS:
        g_square = tl.load(row_stats + entry * 3)
    whole = row_dim
    if row_dim == 0:
        whole = width.to(tl.float32)

    if OPTIMIZER == SGD:
        w = kept - lr * g
    if OPTIMIZER == ADAGRAD:
        total = tl.load(slot0 + row * width + columns, inside, 0.0) + g * g
        tl.store(slot0 + row * width + columns, total, inside)
        w = kept - lr * g / (tl.sqrt(total) + eps)
    if OPTIMIZER == ROWWISE_ADAGRAD:
        mean = tl.load(slot0 + row) + g_square / whole
        tl.store(slot0 + row, mean)
        w = kept - lr / (tl.sqrt(mean) + eps) * g
    if (OPTIMIZER >= ADAM) & (OPTIMIZER <= PARTIAL_ROWWISE_LAMB):
        m = beta1 * tl.load(slot0 + row * width + columns, inside, 0.0) + (1 - beta1) * g
        tl.store(slot0 + row * width + columns, m, inside)
        if (OPTIMIZER == ADAM) | (OPTIMIZER == LAMB):
            v = beta2 * tl.load(slot1 + row * width + columns, inside, 0.0) + (1 - beta2) * g * g
            tl.store(slot1 + row * width + columns, v, inside)
            r = m / correction1 / (tl.sqrt(v / correction2) + eps)
        else:
            v_row = beta2 * tl.load(slot1 + row) + (1 - beta2) * g_square / whole
            tl.store(slot1 + row, v_row)
            r = m / correction1 / (tl.sqrt(v_row / correction2) + eps)
        if (OPTIMIZER == ADAM) | (OPTIMIZER == PARTIAL_ROWWISE_ADAM):
            w = kept - lr * r
        else:
            if DECAY == _DECOUPLED:
                r += weight_decay * w
            w_square, r_square = tl.sum(w * w, 0), tl.sum(tl.where(inside, r * r, 0.0), 0)
            if STATS:
                w_square, r_square = tl.load(row_stats + entry * 3 + 1), tl.load(row_stats + entry * 3 + 2)
            both = (w_square > 0) & (r_square > 0)
            ratio = tl.where(both, tl.sqrt(w_square) / tl.sqrt(tl.where(both, r_square, 1.0)), 1.0)
            w -= lr * ratio * r
    if OPTIMIZER == LARS:
        decay = 0.0
        if DECAY == _L2:
            decay = weight_decay
        w_square = tl.sum(w * w, 0)
        if STATS:
            w_square = tl.load(row_stats + entry * 3 + 1)
        w_norm, g_norm = tl.sqrt(w_square), tl.sqrt(g_square)
        both = (w_norm > 0) & (g_norm > 0)
        local = tl.where(both, trust * w_norm / tl.where(both, g_norm + decay * w_norm + eps, 1.0), 1.0)
        m = momentum * tl.load(slot0 + row * width + columns, inside, 0.0) + lr * local * (g + decay * w)
        tl.store(slot0 + row * width + columns, m, inside)
        w = kept - m

    if WEIGHT == tl.float32:
        tl.store(target, w, inside)
    else:
        seed, step = tl.load(counters), tl.load(counters + 1)
        first_row, first_column = tl.load(fields + 5), tl.load(fields + 6)
        bits = _random_bits(seed, step, first_row + row, first_column + columns.to(tl.int64))
        tl.store(target, _rounded(w, bits, STOCHASTIC, WEIGHT), inside)
