"""The Triton kernels of the table-batched lookups and their update; ``triton.py`` launches them.

A lookup is one feature's part of one block, described by ``LOOKUP_FIELDS`` integers. The contribution of an
ID of a lookup to a gradient is an entry: its row (numbered through all tables), the start of its gradient,
and its factor. Entries sorted by row form runs. The first entry of a run sums the run and writes the row.

A program works on several bags or runs side by side, because most of its time goes into waiting for memory.
``ALIGN`` is 4 if every row begins at a multiple of 16 bytes, and 1 otherwise. With 4, a thread reads four
numbers at once.
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

_AT_ONCE: tl.constexpr = tl.constexpr(4)
"""Rows that a program asks for before it waits for the first of them."""
OFFSETS_AT_ONCE = 1024
"""Offsets that one program checks."""
PART = 64
"""Entries of a run that one program sums."""
_PART: tl.constexpr = tl.constexpr(PART)
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
def check_offsets(offsets, num_bags, num_ids, is_bad, BLOCK: tl.constexpr):
    """Set is_bad unless the offsets begin at 0, never decrease, and end at the number of IDs."""
    bags = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = bags < num_bags
    begin, end = tl.load(offsets + bags, inside, 0), tl.load(offsets + bags + 1, inside, 0)
    bad = (end < begin) | ((bags == 0) & (begin != 0)) | ((bags == num_bags - 1) & (end != num_ids))
    if tl.max((bad & inside).to(tl.int32), 0) > 0:
        tl.store(is_bad, 1)


@triton.jit
def _rows(address, row, there, width, columns, WEIGHT: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr):
    """Load rows as fp32 [rows, BLOCK]: floating-point values (BITS 0), or codes with scale and bias, see
    ``ops.nbit.naive``. Rows that are not ``there`` and columns beyond the width are 0.
    """
    inside = there[:, None] & (columns < width)[None, :]
    if BITS == 0:
        table = tl.multiple_of(address.to(tl.pointer_type(WEIGHT)), 4 * ALIGN)
        return tl.load(table + (row * width)[:, None] + columns[None, :], inside, 0.0).to(tl.float32)
    at = address + row * (4 + ((width * BITS + 7) // 8 + 3) // 4 * 4)
    params = at.to(tl.pointer_type(tl.float16))
    scale, bias = tl.load(params, there, 0.0), tl.load(params + 1, there, 0.0)
    codes = (at + 4).to(tl.pointer_type(tl.uint8))
    code = tl.load(codes[:, None] + (columns * BITS // 8)[None, :], inside, 0).to(tl.int32)
    code = (code >> (columns * BITS % 8)[None, :]) & ((1 << BITS) - 1)
    x = scale.to(tl.float32)[:, None] * code.to(tl.float32) + bias.to(tl.float32)[:, None]
    return tl.where(inside, x, 0.0)


@triton.jit
def look_up(
    lookups,
    addresses,
    num_rows,
    ids,
    offsets,
    sample_weights,
    num_ids,
    is_bad,
    out,
    WEIGHT: tl.constexpr,
    BITS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CHECK: tl.constexpr,
    ALIGN: tl.constexpr,
    BAGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Look up some bags of one lookup: write their pooled rows, or all their rows if nothing is pooled.

    With CHECK, set is_bad if an ID is outside its table or has a NaN weight, and read nothing there.
    """
    fields = lookups + tl.program_id(1) * 7
    bags = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    num_bags, pooling, first_bag = tl.load(fields + 3), tl.load(fields + 6), tl.load(fields + 2)
    if tl.program_id(0) * BAGS >= num_bags:
        return
    width, stride = tl.multiple_of(tl.load(fields + 1), ALIGN), tl.multiple_of(tl.load(fields + 5), ALIGN)
    target = out + tl.multiple_of(tl.load(fields + 4), ALIGN)
    table = tl.load(fields)
    address, height = tl.load(addresses + table), tl.load(num_rows + table)
    columns = tl.arange(0, BLOCK)
    there = bags < num_bags
    begin = tl.load(offsets + first_bag + bags, there, 0).to(tl.int64)
    end = tl.load(offsets + first_bag + bags + 1, there, 0).to(tl.int64)
    if CHECK:  # offsets may be invalid, too
        begin, end = tl.maximum(begin, 0), tl.minimum(end, num_ids)
    first_id = tl.load(offsets + first_bag).to(tl.int64)
    total = tl.zeros([BAGS, BLOCK], tl.float32)
    bad = there & False
    for start in range(0, tl.max(end - begin, 0), _AT_ONCE):
        for step in tl.static_range(_AT_ONCE):
            at = begin + start + step
            here = at < end
            row = tl.load(ids + at, here, 0).to(tl.int64)
            if CHECK:
                bad = bad | (here & ((row < 0) | (row >= height)))
                here = here & (row >= 0) & (row < height)
            x = _rows(address, row, here, width, columns, WEIGHT, BITS, ALIGN)
            if WEIGHTED:
                weight = tl.load(sample_weights + at, here, 0.0)
                bad = bad | (weight != weight)
            if pooling == _NONE:
                places = ((at - first_id) * stride)[:, None] + columns[None, :]
                tl.store(
                    target + places, x.to(out.dtype.element_ty), here[:, None] & (columns < width)[None, :]
                )
            else:
                if WEIGHTED:
                    x *= weight[:, None]
                total += x
    if CHECK and tl.max(bad.to(tl.int32), 0) > 0:
        tl.store(is_bad, 1)
    if pooling != _NONE:
        if pooling == _MEAN:
            total = total / tl.maximum(end - begin, 1).to(tl.float32)[:, None]
        places = (bags * stride)[:, None] + columns[None, :]
        tl.store(target + places, total.to(out.dtype.element_ty), there[:, None] & (columns < width)[None, :])


@triton.jit
def list_entries(
    lookups,
    rounds,
    num_ids,
    tables,
    ids,
    offsets,
    sample_weights,
    rows,
    starts,
    factors,
    tables_of,
    WEIGHTED: tl.constexpr,
    BAGS: tl.constexpr,
    IDS: tl.constexpr,
):
    """Write the entries of some bags of one lookup. The entry of ID ``i`` goes to place ``i`` of the
    lookup's round, which has a place for every ID.
    """
    lookup = tl.program_id(1)
    fields = lookups + lookup * 7
    bags = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    num_bags = tl.load(fields + 3)
    if tl.program_id(0) * BAGS >= num_bags:
        return
    table, stride, pooling = tl.load(fields), tl.load(fields + 5), tl.load(fields + 6)
    first_bag, target = tl.load(fields + 2), tl.load(fields + 4)
    first_row = tl.load(tables + table * 7 + 4)
    there = bags < num_bags
    begin = tl.load(offsets + first_bag + bags, there, 0).to(tl.int64)
    end = tl.load(offsets + first_bag + bags + 1, there, 0).to(tl.int64)
    first_id = tl.load(offsets + first_bag).to(tl.int64)
    entries = tl.load(rounds + lookup) * num_ids
    shared = tl.full([BAGS], 1.0, tl.float32)
    if pooling == _MEAN:
        shared = 1.0 / tl.maximum(end - begin, 1).to(tl.float32)
    for start in range(0, tl.max(end - begin, 0), IDS):
        at = (begin + start)[:, None] + tl.arange(0, IDS)[None, :]
        here = at < end[:, None]
        place = entries + at
        row = tl.load(ids + at, here, 0).to(tl.int64)
        tl.store(rows + place, (first_row + row).to(rows.dtype.element_ty), here)
        tl.store(tables_of + place, tl.zeros_like(row).to(tl.int32) + table.to(tl.int32), here)
        factor = shared[:, None] + tl.zeros([BAGS, IDS], tl.float32)
        if WEIGHTED:
            factor = factor * tl.load(sample_weights + at, here, 0.0)
        tl.store(factors + place, factor, here)
        if pooling == _NONE:
            tl.store(starts + place, target + (at - first_id) * stride, here)
        else:
            tl.store(starts + place, target + (bags * stride)[:, None] + tl.zeros_like(at), here)


@triton.jit
def _heads(rows, num_entries, end_of_rows, RUNS: tl.constexpr):
    """Return the places of some entries, their rows, and which of them are the first of their run."""
    at = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    row = tl.load(rows + at, at < num_entries, end_of_rows).to(tl.int64)
    before = tl.load(rows + at - 1, (at > 0) & (at < num_entries), -1).to(tl.int64)
    return at, row, (row < end_of_rows) & (before != row)


@triton.jit
def _sum_part(
    grad,
    rows,
    order,
    starts,
    factors,
    at,
    row,
    going,
    num_entries,
    width,
    ALIGN: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the gradients of runs from ``at`` to the end of the runs or of their parts: fp32 [RUNS, BLOCK]."""
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([RUNS, BLOCK], tl.float32)
    end = tl.where(going, tl.minimum((at // _PART + 1) * _PART, num_entries), 0)
    while tl.max(going.to(tl.int32), 0) > 0:
        for _ in tl.static_range(_AT_ONCE):
            # Rows ascend: once another row came, this one does not come again. Triton 3.6 fails if the loop
            # does not read what its condition reads.
            going = going & (tl.load(rows + at, at < end, -1).to(tl.int64) == row)
            entry = tl.load(order + at, going, 0)
            start = tl.multiple_of(tl.load(starts + entry, going, 0), [ALIGN])
            x = tl.load(
                grad + start[:, None] + columns[None, :],
                going[:, None] & (columns[None, :] < width[:, None]),
                0.0,
            )
            total += x * tl.load(factors + entry, going, 0.0)[:, None]
            at += 1
    return total


@triton.jit
def sum_parts(
    grad,
    rows,
    order,
    starts,
    factors,
    tables_of,
    tables,
    parts,
    num_entries,
    end_of_rows,
    ALIGN: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum parts of long runs.

    Entries are cut into parts of ``_PART``. If the run of a part's first entry began in an earlier part, its
    entries in this part are summed to ``parts[number of the part]``, so that a row that is in every sample
    is no chain of additions.
    """
    part = tl.program_id(0).to(tl.int64) * PARTS + tl.arange(0, PARTS) + 1
    at = part * _PART
    row = tl.load(rows + at, at < num_entries, end_of_rows).to(tl.int64)
    before = tl.load(rows + at - 1, at < num_entries, end_of_rows).to(tl.int64)
    going = (row < end_of_rows) & (before == row)
    if tl.max(going.to(tl.int32), 0) == 0:
        return
    table = tl.load(tables_of + tl.load(order + at, going, 0), going, 0)
    width = tl.load(tables + table * 7 + 3, going, 0)
    total = _sum_part(
        grad, rows, order, starts, factors, at, row, going, num_entries, width, ALIGN, PARTS, BLOCK
    )
    tl.store(parts + (part * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :], total, going[:, None])


@triton.jit
def _sum_runs(
    grad,
    rows,
    order,
    starts,
    factors,
    parts,
    at,
    row,
    first,
    num_entries,
    width,
    ALIGN: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the gradients of the runs that begin at ``at``: fp32 [RUNS, BLOCK]."""
    total = _sum_part(
        grad, rows, order, starts, factors, at, row, first, num_entries, width, ALIGN, RUNS, BLOCK
    )
    columns = tl.arange(0, BLOCK)
    part, going = at // _PART + 1, first
    end = tl.where(first, (num_entries + _PART - 1) // _PART, 0)
    while tl.max(going.to(tl.int32), 0) > 0:
        for _ in tl.static_range(_AT_ONCE):
            going = going & (tl.load(rows + part * _PART, part < end, -1).to(tl.int64) == row)
            total += tl.load(parts + (part * BLOCK)[:, None] + columns[None, :], going[:, None], 0.0)
            part += 1
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
    parts,
    numbers,
    num_entries,
    end_of_rows,
    DENSE: tl.constexpr,
    ALIGN: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sums of runs to the tables' first state slot, and (unless DENSE) their rows to the second.

    ``numbers`` is the number of each entry's run within its table; with DENSE, the row itself is the place.
    """
    at, row, first = _heads(rows, num_entries, end_of_rows, RUNS)
    if tl.max(first.to(tl.int32), 0) == 0:
        return
    fields = tables + tl.load(tables_of + tl.load(order + at, first, 0), first, 0) * 7
    width = tl.load(fields + 3, first, 0)
    total = _sum_runs(
        grad, rows, order, starts, factors, parts, at, row, first, num_entries, width, ALIGN, RUNS, BLOCK
    )
    columns = tl.arange(0, BLOCK)
    local = row - tl.load(fields + 4, first, 0)
    if DENSE:
        place = local
    else:
        place = tl.load(numbers + at, first, 0)
        tl.store(tl.load(fields + 2, first, 0).to(tl.pointer_type(tl.int64)) + place, local, first)
    sums = tl.load(fields + 1, first, 0).to(tl.pointer_type(tl.float32))
    places = (sums + place * width)[:, None] + columns[None, :]
    tl.store(places, total, first[:, None] & (columns[None, :] < width[:, None]))


@triton.jit
def _random_bits(seed, step, row, columns):
    """Return 16 random bits for every number of some rows, see ``naive_update.random_bits``. Products wrap
    like those of uint64.
    """
    x = (row * -7046029254386353131)[:, None] + (columns * -4417276706812531889)
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
    """Apply decoupled weight decay to the rows."""
    if DECAY == _DECOUPLED:
        w = w * (1 - _number(hyper, _LR) * _number(hyper, _WEIGHT_DECAY))
    return w


@triton.jit
def _sum_of_squares(x, stats, first, which: tl.constexpr, STATS: tl.constexpr):
    """Return the sum of squares of each row. For parts of rows, return the sums over the whole rows from
    ``stats``.
    """
    total = tl.sum(x * x, 1)
    if STATS:
        total = tl.load(stats + which, first, 0.0)
    return total


@triton.jit
def _mean_square(g, stats, first, hyper, width, STATS: tl.constexpr):
    whole = _number(hyper, _ROW_DIM)
    whole = tl.where(whole == 0, width.to(tl.float32), whole)
    return _sum_of_squares(g, stats, first, _GRADIENT_SUM, STATS) / tl.where(first, whole, 1.0)


@triton.jit
def _sgd(w, g, hyper, DECAY: tl.constexpr):
    return _kept(w, hyper, DECAY) - _number(hyper, _LR) * g


@triton.jit
def _adagrad(w, g, total_at, inside, hyper, DECAY: tl.constexpr):
    total = tl.load(total_at, inside, 0.0) + g * g
    tl.store(total_at, total, inside)
    return _kept(w, hyper, DECAY) - _number(hyper, _LR) * g / (tl.sqrt(total) + _number(hyper, _EPS))


@triton.jit
def _rowwise_adagrad(w, g, total_at, first, stats, hyper, width, DECAY: tl.constexpr, STATS: tl.constexpr):
    total = tl.load(total_at, first, 0.0) + _mean_square(g, stats, first, hyper, width, STATS)
    tl.store(total_at, total, first)
    scale = _number(hyper, _LR) / (tl.sqrt(total) + _number(hyper, _EPS))
    return _kept(w, hyper, DECAY) - scale[:, None] * g


@triton.jit
def _direction(
    g, m_at, v_at, inside, first, stats, hyper, width, ROW_STATE: tl.constexpr, STATS: tl.constexpr
):
    """Return Adam's step before the learning rate."""
    beta1, beta2 = _number(hyper, _BETA1), _number(hyper, _BETA2)
    m = beta1 * tl.load(m_at, inside, 0.0) + (1 - beta1) * g
    tl.store(m_at, m, inside)
    if ROW_STATE:
        square = _mean_square(g, stats, first, hyper, width, STATS)
        v = beta2 * tl.load(v_at, first, 0.0) + (1 - beta2) * square
        tl.store(v_at, v, first)
        scale = (tl.sqrt(v / _number(hyper, _CORRECTION2)) + _number(hyper, _EPS))[:, None]
    else:
        v = beta2 * tl.load(v_at, inside, 0.0) + (1 - beta2) * g * g
        tl.store(v_at, v, inside)
        scale = tl.sqrt(v / _number(hyper, _CORRECTION2)) + _number(hyper, _EPS)
    return m / _number(hyper, _CORRECTION1) / scale


@triton.jit
def _lamb(w, r, inside, first, stats, hyper, DECAY: tl.constexpr, STATS: tl.constexpr):
    if DECAY == _DECOUPLED:
        r += _number(hyper, _WEIGHT_DECAY) * w
    w_square = _sum_of_squares(w, stats, first, _WEIGHT_SUM, STATS)
    r_square = _sum_of_squares(tl.where(inside, r, 0.0), stats, first, _DIRECTION_SUM, STATS)
    both = (w_square > 0) & (r_square > 0)
    ratio = tl.where(both, tl.sqrt(w_square) / tl.sqrt(tl.where(both, r_square, 1.0)), 1.0)
    return w - (_number(hyper, _LR) * ratio)[:, None] * r


@triton.jit
def _lars(w, g, m_at, inside, first, stats, hyper, DECAY: tl.constexpr, STATS: tl.constexpr):
    decay = 0.0
    if DECAY == _L2:
        decay = _number(hyper, _WEIGHT_DECAY)
    w_norm = tl.sqrt(_sum_of_squares(w, stats, first, _WEIGHT_SUM, STATS))
    g_norm = tl.sqrt(_sum_of_squares(g, stats, first, _GRADIENT_SUM, STATS))
    both = (w_norm > 0) & (g_norm > 0)
    scale = tl.where(both, g_norm + decay * w_norm + _number(hyper, _EPS), 1.0)
    local = tl.where(both, _number(hyper, _TRUST) * w_norm / scale, 1.0)
    m = _number(hyper, _MOMENTUM) * tl.load(m_at, inside, 0.0)
    m += (_number(hyper, _LR) * local)[:, None] * (g + decay * w)
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
def _pointers(fields, first, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    return tl.multiple_of(tl.load(fields, first, 0).to(tl.pointer_type(TYPE)), [4 * ALIGN])


@triton.jit
def update_runs(
    grad,
    rows,
    order,
    starts,
    factors,
    tables_of,
    tables,
    parts,
    row_stats,
    num_entries,
    end_of_rows,
    hyper,
    OPTIMIZER: tl.constexpr,
    DECAY: tl.constexpr,
    STATS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGN: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the rows of the runs that begin among some entries, by the formulas of ``formulas.py``.

    ``hyper`` is float64: the fields of ``Hyper`` in order, then ``1 - beta1^step`` and ``1 - beta2^step``.
    """
    at, row, first = _heads(rows, num_entries, end_of_rows, RUNS)
    if tl.max(first.to(tl.int32), 0) == 0:
        return
    entry = tl.load(order + at, first, 0)
    fields = tables + tl.load(tables_of + entry, first, 0) * 7
    width = tl.multiple_of(tl.load(fields + 3, first, 0), [ALIGN])
    local = row - tl.load(fields + 4, first, 0)
    columns = tl.arange(0, BLOCK)
    inside = first[:, None] & (columns[None, :] < width[:, None])
    place = (local * width)[:, None] + columns[None, :]
    target = _pointers(fields, first, WEIGHT, ALIGN)[:, None] + place
    w = tl.load(target, inside, 0.0).to(tl.float32)  # asked for before the sum, which takes longer
    g = _sum_runs(
        grad, rows, order, starts, factors, parts, at, row, first, num_entries, width, ALIGN, RUNS, BLOCK
    )
    slot0, slot1 = (
        _pointers(fields + 1, first, tl.float32, ALIGN),
        _pointers(fields + 2, first, tl.float32, ALIGN),
    )
    at0, at1, row0, row1 = slot0[:, None] + place, slot1[:, None] + place, slot0 + local, slot1 + local
    stats = row_stats
    if STATS:
        stats = row_stats + entry * 3
    if (DECAY == _L2) & (OPTIMIZER != _LARS):
        g += _number(hyper, _WEIGHT_DECAY) * w

    if OPTIMIZER == _SGD:
        w = _sgd(w, g, hyper, DECAY)
    elif OPTIMIZER == _ADAGRAD:
        w = _adagrad(w, g, at0, inside, hyper, DECAY)
    elif OPTIMIZER == _ROWWISE_ADAGRAD:
        w = _rowwise_adagrad(w, g, row0, first, stats, hyper, width, DECAY, STATS)
    elif OPTIMIZER == _ADAM:
        r = _direction(g, at0, at1, inside, first, stats, hyper, width, False, STATS)
        w = _kept(w, hyper, DECAY) - _number(hyper, _LR) * r
    elif OPTIMIZER == _PARTIAL_ROWWISE_ADAM:
        r = _direction(g, at0, row1, inside, first, stats, hyper, width, True, STATS)
        w = _kept(w, hyper, DECAY) - _number(hyper, _LR) * r
    elif OPTIMIZER == _LAMB:
        r = _direction(g, at0, at1, inside, first, stats, hyper, width, False, STATS)
        w = _lamb(w, r, inside, first, stats, hyper, DECAY, STATS)
    elif OPTIMIZER == _PARTIAL_ROWWISE_LAMB:
        r = _direction(g, at0, row1, inside, first, stats, hyper, width, True, STATS)
        w = _lamb(w, r, inside, first, stats, hyper, DECAY, STATS)
    elif OPTIMIZER == _LARS:
        w = _lars(w, g, at0, inside, first, stats, hyper, DECAY, STATS)
    elif OPTIMIZER == _FTRL:
        w = _ftrl(w, g, at0, at1, inside, hyper)
    else:
        tl.static_assert(False, "an optimizer of formulas.py has no formula here")

    if WEIGHT == tl.float32:
        tl.store(target, w, inside)
    else:
        seed, step = tl.load(hyper + _SEED).to(tl.int64), tl.load(hyper + _STEP).to(tl.int64)
        whole_row = tl.load(fields + 5, first, 0) + local
        whole_columns = tl.load(fields + 6, first, 0)[:, None] + columns[None, :].to(tl.int64)
        bits = _random_bits(seed, step, whole_row, whole_columns)
        tl.store(target, _rounded(w, bits, STOCHASTIC, WEIGHT), inside)
