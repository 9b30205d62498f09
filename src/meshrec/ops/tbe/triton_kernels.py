"""The Triton kernels of the table-batched lookups and their update; ``triton.py`` launches them.

A lookup is one feature's part of one block, described by ``LOOKUP_FIELDS`` integers. The contribution of an
ID of a lookup to a gradient is an entry: its row (numbered through all tables), the start of its gradient,
and its factor. Entries sorted by row form runs. The first entry of a run sums the run and writes the row.

A program works on several bags or runs side by side, because most of its time goes into waiting for memory.
``ALIGN`` is 4 if every row begins at a multiple of 16 bytes, and 1 otherwise. With 4, a thread reads four
numbers at once.
"""


# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

import triton
import triton.language as tl

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
def _bags(fields, offsets, BAGS: tl.constexpr):
    """Return the program's bags, which of them exist, the begin and end of their IDs, and the lookup's first
    ID.
    """
    bags = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    there = bags < tl.load(fields + 3)
    at = offsets + tl.load(fields + 2)
    begin = tl.load(at + bags, there, 0).to(tl.int64)
    end = tl.load(at + bags + 1, there, 0).to(tl.int64)
    return bags, there, begin, end, tl.load(at).to(tl.int64)


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
    if tl.program_id(0) * BAGS >= tl.load(fields + 3):
        return
    bags, there, begin, end, first_id = _bags(fields, offsets, BAGS)
    if CHECK:  # offsets may be invalid, too
        begin, end = tl.maximum(begin, 0), tl.minimum(end, num_ids)
    table, pooling = tl.load(fields), tl.load(fields + 6)
    width, stride = tl.multiple_of(tl.load(fields + 1), ALIGN), tl.multiple_of(tl.load(fields + 5), ALIGN)
    target = out + tl.multiple_of(tl.load(fields + 4), ALIGN)
    address, height = tl.load(addresses + table), tl.load(num_rows + table)
    columns = tl.arange(0, BLOCK)
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
    if tl.program_id(0) * BAGS >= tl.load(fields + 3):
        return
    bags, _there, begin, end, first_id = _bags(fields, offsets, BAGS)
    table, stride, pooling = tl.load(fields), tl.load(fields + 5), tl.load(fields + 6)
    target, first_row = tl.load(fields + 4), tl.load(tables + table * 7 + 4)
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
def heads(rows, num_entries, end_of_rows, RUNS: tl.constexpr):
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
    entries in this part are summed to ``parts[number of the part]``. The gradients of a row that is in every
    sample are then summed part by part at once, and not one after another.
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
def sum_of_runs(
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
    at, row, first = heads(rows, num_entries, end_of_rows, RUNS)
    if tl.max(first.to(tl.int32), 0) == 0:
        return
    fields = tables + tl.load(tables_of + tl.load(order + at, first, 0), first, 0) * 7
    width = tl.load(fields + 3, first, 0)
    total = sum_of_runs(
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
