"""The Triton kernels of the table-batched lookups and their update; ``triton.py`` launches them.

A lookup is one feature's part of one block, described by ``LOOKUP_FIELDS`` integers. The contribution of an
ID of a lookup to a gradient is an entry: its row (numbered through all tables), the start of its gradient,
and its factor. Entries sorted by row form runs. The first entry of a run sums the run and writes the row.
"""

# ruff: noqa: SIM300 - constants of the compiler are in capitals
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

import triton
import triton.language as tl

from meshrec.ops.tbe import formulas
from meshrec.ops.tbe.formulas import Hyper, OptimizerKind, RowSum

LOOKUP_FIELDS = 7
"""The fields of a lookup: table, width, first bag, number of bags, first element of the output, elements
between output rows, pooling.
"""
TABLE_FIELDS = 7
"""The fields of a table: addresses of the weight and of two state slots; width; first row, numbered through
all tables; origin (row, column).
"""

_MEAN: tl.constexpr = tl.constexpr(1)
_NONE: tl.constexpr = tl.constexpr(2)
_L2: tl.constexpr = tl.constexpr(formulas.L2_DECAY)
_DECOUPLED: tl.constexpr = tl.constexpr(formulas.DECOUPLED_DECAY)
_SGD: tl.constexpr = tl.constexpr(OptimizerKind.SGD.code)
_ADAGRAD: tl.constexpr = tl.constexpr(OptimizerKind.ADAGRAD.code)
_ROWWISE_ADAGRAD: tl.constexpr = tl.constexpr(OptimizerKind.ROW_WISE_ADAGRAD.code)
_ADAM: tl.constexpr = tl.constexpr(OptimizerKind.ADAM.code)
_PARTIAL_ROWWISE_ADAM: tl.constexpr = tl.constexpr(OptimizerKind.PARTIAL_ROW_WISE_ADAM.code)
_LAMB: tl.constexpr = tl.constexpr(OptimizerKind.LAMB.code)
_PARTIAL_ROWWISE_LAMB: tl.constexpr = tl.constexpr(OptimizerKind.PARTIAL_ROW_WISE_LAMB.code)
_LARS: tl.constexpr = tl.constexpr(OptimizerKind.LARS.code)
_FTRL: tl.constexpr = tl.constexpr(OptimizerKind.FTRL.code)
_GRADIENT_SUM: tl.constexpr = tl.constexpr(int(RowSum.GRADIENT))
_WEIGHT_SUM: tl.constexpr = tl.constexpr(int(RowSum.WEIGHT))
_DIRECTION_SUM: tl.constexpr = tl.constexpr(int(RowSum.DIRECTION))


def _place_of(name):
    return tl.constexpr(Hyper._fields.index(name))


# The index of each parameter in ``hyper``.
_LR: tl.constexpr = _place_of("lr")
_STEP: tl.constexpr = _place_of("step")
_SEED: tl.constexpr = _place_of("seed")
_ROW_DIM: tl.constexpr = _place_of("row_dim")
_WEIGHT_DECAY: tl.constexpr = _place_of("weight_decay")
_EPS: tl.constexpr = _place_of("eps")
_BETA1: tl.constexpr = _place_of("beta1")
_BETA2: tl.constexpr = _place_of("beta2")
_MOMENTUM: tl.constexpr = _place_of("momentum")
_TRUST: tl.constexpr = _place_of("trust_coefficient")
_BETA: tl.constexpr = _place_of("beta")
_L1: tl.constexpr = _place_of("l1")
_L2_PROXIMAL: tl.constexpr = _place_of("l2")
_CORRECTION1: tl.constexpr = tl.constexpr(formulas.HYPER_SIZE)
_CORRECTION2: tl.constexpr = tl.constexpr(formulas.HYPER_SIZE + 1)


@triton.jit
def check(lookups, num_rows, ids, offsets, sample_weights, num_ids, is_bad, WEIGHTED: tl.constexpr):
    """Set is_bad if an ID is outside its table or has a NaN weight."""
    fields = lookups + tl.program_id(1) * 7
    bag = tl.program_id(0)
    if bag >= tl.load(fields + 3):
        return
    rows = tl.load(num_rows + tl.load(fields))
    at = offsets + tl.load(fields + 2) + bag
    # Offsets may be invalid, too: never read outside the tensor.
    begin, end = tl.maximum(tl.load(at), 0), tl.minimum(tl.load(at + 1), num_ids)
    for i in range(begin, end):
        row = tl.load(ids + i).to(tl.int64)
        bad = (row < 0) | (row >= rows)
        if WEIGHTED:
            weight = tl.load(sample_weights + i)
            bad = bad | (weight != weight)
        if bad:
            tl.store(is_bad, 1)


@triton.jit
def _row(address, row, width, columns, inside, WEIGHT: tl.constexpr, BITS: tl.constexpr):
    """Load a row as fp32: floating-point values (BITS 0), or codes with scale and bias, see
    ``ops.nbit.naive``.
    """
    if BITS == 0:
        at = address.to(tl.pointer_type(WEIGHT)) + row * width
        return tl.load(at + columns, inside, 0.0).to(tl.float32)
    at = address + row * (4 + ((width * BITS + 7) // 8 + 3) // 4 * 4)
    params = at.to(tl.pointer_type(tl.float16))
    scale, bias = tl.load(params).to(tl.float32), tl.load(params + 1).to(tl.float32)
    codes = (at + 4).to(tl.pointer_type(tl.uint8))
    code = tl.load(codes + columns * BITS // 8, inside, 0).to(tl.int32)
    code = (code >> (columns * BITS % 8)) & ((1 << BITS) - 1)
    return tl.where(inside, scale * code.to(tl.float32) + bias, 0.0)


@triton.jit
def look_up(
    lookups,
    addresses,
    ids,
    offsets,
    sample_weights,
    out,
    WEIGHT: tl.constexpr,
    BITS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Look up one bag of one lookup: write its pooled row, or all its rows if nothing is pooled."""
    fields = lookups + tl.program_id(1) * 7
    bag = tl.program_id(0)
    if bag >= tl.load(fields + 3):
        return
    width, stride, pooling = tl.load(fields + 1), tl.load(fields + 5), tl.load(fields + 6)
    first_bag = tl.load(fields + 2)
    table = tl.load(addresses + tl.load(fields))
    target = out + tl.load(fields + 4)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    begin, end = tl.load(offsets + first_bag + bag), tl.load(offsets + first_bag + bag + 1)
    if pooling == _NONE:
        first_id = tl.load(offsets + first_bag)
        for i in range(begin, end):
            x = _row(table, tl.load(ids + i).to(tl.int64), width, columns, inside, WEIGHT, BITS)
            place = target + (i - first_id).to(tl.int64) * stride
            tl.store(place + columns, x.to(out.dtype.element_ty), inside)
    else:
        total = tl.zeros([BLOCK], tl.float32)
        for i in range(begin, end):
            x = _row(table, tl.load(ids + i).to(tl.int64), width, columns, inside, WEIGHT, BITS)
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
    """Write the entries of one bag of one lookup. The entry of ID ``i`` goes to ``places[lookup] + i``."""
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
    """Write the sums of runs to the tables' first state slot, and (unless DENSE) their rows to the second.

    ``numbers`` is the number of each entry's run within its table; with DENSE, the row itself is the place.
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
    """Return 16 random bits for every column, see ``naive_update.random_bits``. Products wrap like those of
    uint64.
    """
    x = row * -7046029254386353131 + columns * -4417276706812531889
    x += seed * 1609587929392839161 + step * 2870177450012600261
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return ((x ^ ((x >> 31) & 0x1FFFFFFFF)) & 0xFFFF).to(tl.int32)


@triton.jit
def _rounded(x, bits, STOCHASTIC: tl.constexpr, WEIGHT: tl.constexpr):
    """Round to nearest, or at random with the probability of the nearness; see
    ``naive_update.stochastic_round``.
    """
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
def _number(hyper, place: tl.constexpr):
    return tl.load(hyper + place).to(tl.float32)


@triton.jit
def _kept(w, hyper, DECAY: tl.constexpr):
    """Apply decoupled weight decay to the row."""
    if DECAY == _DECOUPLED:
        w = w * (1 - _number(hyper, _LR) * _number(hyper, _WEIGHT_DECAY))
    return w


@triton.jit
def _sum_of_squares(x, stats, which: tl.constexpr, STATS: tl.constexpr):
    """Return the sum of squares of a row. For a part of a row, return the sum over the whole row from
    ``stats``.
    """
    total = tl.sum(x * x, 0)
    if STATS:
        total = tl.load(stats + which)
    return total


@triton.jit
def _mean_square(g, stats, hyper, width, STATS: tl.constexpr):
    whole = _number(hyper, _ROW_DIM)
    whole = tl.where(whole == 0, width.to(tl.float32), whole)
    return _sum_of_squares(g, stats, _GRADIENT_SUM, STATS) / whole


@triton.jit
def _sgd(w, g, hyper, DECAY: tl.constexpr):
    return _kept(w, hyper, DECAY) - _number(hyper, _LR) * g


@triton.jit
def _adagrad(w, g, total_at, inside, hyper, DECAY: tl.constexpr):
    total = tl.load(total_at, inside, 0.0) + g * g
    tl.store(total_at, total, inside)
    return _kept(w, hyper, DECAY) - _number(hyper, _LR) * g / (tl.sqrt(total) + _number(hyper, _EPS))


@triton.jit
def _rowwise_adagrad(w, g, total_at, stats, hyper, width, DECAY: tl.constexpr, STATS: tl.constexpr):
    total = tl.load(total_at) + _mean_square(g, stats, hyper, width, STATS)
    tl.store(total_at, total)
    return _kept(w, hyper, DECAY) - _number(hyper, _LR) / (tl.sqrt(total) + _number(hyper, _EPS)) * g


@triton.jit
def _direction(g, m_at, v_at, inside, stats, hyper, width, ROW_STATE: tl.constexpr, STATS: tl.constexpr):
    """Return Adam's step before the learning rate."""
    beta1, beta2 = _number(hyper, _BETA1), _number(hyper, _BETA2)
    m = beta1 * tl.load(m_at, inside, 0.0) + (1 - beta1) * g
    tl.store(m_at, m, inside)
    if ROW_STATE:
        v_row = beta2 * tl.load(v_at) + (1 - beta2) * _mean_square(g, stats, hyper, width, STATS)
        tl.store(v_at, v_row)
        scale = tl.sqrt(v_row / _number(hyper, _CORRECTION2)) + _number(hyper, _EPS)
    else:
        v = beta2 * tl.load(v_at, inside, 0.0) + (1 - beta2) * g * g
        tl.store(v_at, v, inside)
        scale = tl.sqrt(v / _number(hyper, _CORRECTION2)) + _number(hyper, _EPS)
    return m / _number(hyper, _CORRECTION1) / scale


@triton.jit
def _lamb(w, r, inside, stats, hyper, DECAY: tl.constexpr, STATS: tl.constexpr):
    if DECAY == _DECOUPLED:
        r += _number(hyper, _WEIGHT_DECAY) * w
    w_square = _sum_of_squares(w, stats, _WEIGHT_SUM, STATS)
    r_square = _sum_of_squares(tl.where(inside, r, 0.0), stats, _DIRECTION_SUM, STATS)
    both = (w_square > 0) & (r_square > 0)
    ratio = tl.where(both, tl.sqrt(w_square) / tl.sqrt(tl.where(both, r_square, 1.0)), 1.0)
    return w - _number(hyper, _LR) * ratio * r


@triton.jit
def _lars(w, g, m_at, inside, stats, hyper, DECAY: tl.constexpr, STATS: tl.constexpr):
    decay = 0.0
    if DECAY == _L2:
        decay = _number(hyper, _WEIGHT_DECAY)
    w_norm = tl.sqrt(_sum_of_squares(w, stats, _WEIGHT_SUM, STATS))
    g_norm = tl.sqrt(_sum_of_squares(g, stats, _GRADIENT_SUM, STATS))
    both = (w_norm > 0) & (g_norm > 0)
    scale = tl.where(both, g_norm + decay * w_norm + _number(hyper, _EPS), 1.0)
    local = tl.where(both, _number(hyper, _TRUST) * w_norm / scale, 1.0)
    m = _number(hyper, _MOMENTUM) * tl.load(m_at, inside, 0.0)
    m += _number(hyper, _LR) * local * (g + decay * w)
    tl.store(m_at, m, inside)
    return _kept(w, hyper, DECAY) - m


@triton.jit
def _ftrl(w, g, n_at, z_at, inside, hyper):
    lr, n = _number(hyper, _LR), tl.load(n_at, inside, 0.0)
    root = tl.sqrt(n + g * g)
    tl.store(n_at, n + g * g, inside)
    z = tl.load(z_at, inside, 0.0) + g - g * g / (root + tl.sqrt(n) + 1e-37) / lr * w
    tl.store(z_at, z, inside)
    over = tl.abs(z) - _number(hyper, _L1)
    # If nothing is above the threshold, the root may be 0 as well.
    scale = tl.where(over > 0, (_number(hyper, _BETA) + root) / lr + _number(hyper, _L2_PROXIMAL), 1.0)
    return tl.where(over > 0, tl.where(z > 0, -over, over) / scale, 0.0)


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
    hyper,
    OPTIMIZER: tl.constexpr,
    DECAY: tl.constexpr,
    STATS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the row of one run, by the formulas of ``formulas.py``.

    ``hyper`` is float64: the fields of ``Hyper`` in order, then ``1 - beta1^step`` and ``1 - beta2^step``.
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
    place = row * width + columns
    target = tl.load(fields).to(tl.pointer_type(WEIGHT)) + place
    slot0 = tl.load(fields + 1).to(tl.pointer_type(tl.float32))
    slot1 = tl.load(fields + 2).to(tl.pointer_type(tl.float32))
    stats = row_stats
    if STATS:
        stats = row_stats + entry * 3
    w = tl.load(target, inside, 0.0).to(tl.float32)
    if (DECAY == _L2) & (OPTIMIZER != _LARS):
        g += _number(hyper, _WEIGHT_DECAY) * w

    if OPTIMIZER == _SGD:
        w = _sgd(w, g, hyper, DECAY)
    elif OPTIMIZER == _ADAGRAD:
        w = _adagrad(w, g, slot0 + place, inside, hyper, DECAY)
    elif OPTIMIZER == _ROWWISE_ADAGRAD:
        w = _rowwise_adagrad(w, g, slot0 + row, stats, hyper, width, DECAY, STATS)
    elif OPTIMIZER == _ADAM:
        r = _direction(g, slot0 + place, slot1 + place, inside, stats, hyper, width, False, STATS)
        w = _kept(w, hyper, DECAY) - _number(hyper, _LR) * r
    elif OPTIMIZER == _PARTIAL_ROWWISE_ADAM:
        r = _direction(g, slot0 + place, slot1 + row, inside, stats, hyper, width, True, STATS)
        w = _kept(w, hyper, DECAY) - _number(hyper, _LR) * r
    elif OPTIMIZER == _LAMB:
        r = _direction(g, slot0 + place, slot1 + place, inside, stats, hyper, width, False, STATS)
        w = _lamb(w, r, inside, stats, hyper, DECAY, STATS)
    elif OPTIMIZER == _PARTIAL_ROWWISE_LAMB:
        r = _direction(g, slot0 + place, slot1 + row, inside, stats, hyper, width, True, STATS)
        w = _lamb(w, r, inside, stats, hyper, DECAY, STATS)
    elif OPTIMIZER == _LARS:
        w = _lars(w, g, slot0 + place, inside, stats, hyper, DECAY, STATS)
    elif OPTIMIZER == _FTRL:
        w = _ftrl(w, g, slot0 + place, slot1 + place, inside, hyper)
    else:
        tl.static_assert(False, "an optimizer of formulas.py has no formula here")

    if WEIGHT == tl.float32:
        tl.store(target, w, inside)
    else:
        seed, step = tl.load(hyper + _SEED).to(tl.int64), tl.load(hyper + _STEP).to(tl.int64)
        first_row, first_column = tl.load(fields + 5), tl.load(fields + 6)
        bits = _random_bits(seed, step, first_row + row, first_column + columns.to(tl.int64))
        tl.store(target, _rounded(w, bits, STOCHASTIC, WEIGHT), inside)
