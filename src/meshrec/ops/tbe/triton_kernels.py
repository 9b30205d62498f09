"""Triton kernels for table lookups and gradient sums; ``triton.py`` launches them.

A lookup is a feature in a block (see ``layout.py``), described by ``LOOKUP_FIELDS`` integers. An entry is
what an ID in a lookup contributes to the gradient: a row (numbered across all tables), the gradient position,
and a factor. Entries are sorted by row. A run is a sequence of entries with the same row. The program that
handles the first entry in a run sums the run and writes the row, so no two programs write the same row.

A program processes several bags or runs in parallel, which hides memory latency. ``ALIGN`` is 4 if every row
starts at a multiple of 16 bytes, so that a thread can load four values at once; otherwise it is 1.
"""


# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

import triton
import triton.language as tl

LOOKUP_FIELDS = 7
"""Number of integers that describe a lookup: table, width, first bag, bag count, first output element,
output row stride, pooling mode.
"""
TABLE_FIELDS = 7
"""Number of integers that describe a table: weight address, addresses for two state slots, width, first
row in the numbering across all tables, and origin (row, column) in the whole table.
"""

_AT_ONCE: tl.constexpr = tl.constexpr(4)
"""Row loads that a program issues before it waits for the first."""
OFFSETS_AT_ONCE = 1024
"""Offsets that a program of ``check_offsets`` checks."""
PART = 64
"""Entries per part. If a run spans several parts, several programs sum it: a program per part."""
# Kernels may only read global constants with the type tl.constexpr.
_PART: tl.constexpr = tl.constexpr(PART)
# Pooling modes, as in layout.py.
_MEAN: tl.constexpr = tl.constexpr(1)
_NONE: tl.constexpr = tl.constexpr(2)


@triton.jit
def check_offsets(offsets, num_bags, num_ids, is_bad, BLOCK: tl.constexpr):
    """Set ``is_bad`` to 1 unless the offsets start at 0, never decrease, and end at the number of IDs.

    Args:
        offsets: first ID index per bag, followed by N.
        is_bad: output flag, int32 [1], initially 0.
    """
    bags = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = bags < num_bags
    start, end = tl.load(offsets + bags, inside, 0), tl.load(offsets + bags + 1, inside, 0)
    bad = (end < start) | ((bags == 0) & (start != 0)) | ((bags == num_bags - 1) & (end != num_ids))
    if tl.max((bad & inside).to(tl.int32), 0) > 0:
        tl.store(is_bad, 1)


@triton.jit
def _load_rows(
    address, row, is_valid, width, columns, WEIGHT: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr
):
    """Load rows from a table as fp32 [rows, BLOCK].

    If BITS is 0, the table has floating-point rows with the dtype WEIGHT. Otherwise a row has integer codes,
    a scale and a bias; see ``ops.nbit.naive``. The result is 0 for rows where ``is_valid`` is false, and for
    columns beyond ``width``.
    """
    inside = is_valid[:, None] & (columns < width)[None, :]
    if BITS == 0:
        table = tl.multiple_of(address.to(tl.pointer_type(WEIGHT)), 4 * ALIGN)
        return tl.load(table + (row * width)[:, None] + columns[None, :], inside, 0.0).to(tl.float32)
    # A quantized row: fp16 scale, fp16 bias, then the codes, padded to a multiple of 4 bytes.
    at = address + row * (4 + ((width * BITS + 7) // 8 + 3) // 4 * 4)
    params = at.to(tl.pointer_type(tl.float16))
    scale, bias = tl.load(params, is_valid, 0.0), tl.load(params + 1, is_valid, 0.0)
    codes = (at + 4).to(tl.pointer_type(tl.uint8))
    code = tl.load(codes[:, None] + (columns * BITS // 8)[None, :], inside, 0).to(tl.int32)
    # Several codes share a byte, the lowest bits first.
    code = (code >> (columns * BITS % 8)[None, :]) & ((1 << BITS) - 1)
    x = scale.to(tl.float32)[:, None] * code.to(tl.float32) + bias.to(tl.float32)[:, None]
    return tl.where(inside, x, 0.0)


@triton.jit
def _load_bag_ranges(fields, offsets, BAGS: tl.constexpr):
    """Load the ID ranges of the bags that this program handles.

    Returns:
        - Bag numbers in the lookup, int64 [BAGS].
        - Whether a bag exists. The last program may have fewer than BAGS bags.
        - Index of each bag's first ID, int64 [BAGS].
        - Index after each bag's last ID, int64 [BAGS].
        - Index of the lookup's first ID.
    """
    bags = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    is_valid = bags < tl.load(fields + 3)
    at = offsets + tl.load(fields + 2)
    start = tl.load(at + bags, is_valid, 0).to(tl.int64)
    end = tl.load(at + bags + 1, is_valid, 0).to(tl.int64)
    return bags, is_valid, start, end, tl.load(at).to(tl.int64)


@triton.jit
def look_up(
    lookups,
    addresses,
    num_rows,
    ids,
    offsets,
    sample_weights,
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
    """Look up this program's bags: write a pooled row per bag, or a row per ID without pooling.

    The bags advance together: iteration i reads the i-th ID of every bag, until the longest bag ends. The
    inner loop is unrolled, so several row loads are in flight. With CHECK, set ``is_bad`` if an ID is outside
    the table or has a NaN weight, and skip such rows.

    Args:
        ids: IDs [N].
        offsets: first ID index per bag, followed by N.
        sample_weights: fp32 [N], read if WEIGHTED.
        is_bad: flag, int32 [1], used if CHECK. With 1 (invalid offsets), the kernel writes no rows.
        BITS: bits per code; 0 for floating-point rows.
    """
    fields = lookups + tl.program_id(1) * 7
    if tl.program_id(0) * BAGS >= tl.load(fields + 3):
        return
    # Invalid offsets, which check_offsets has found, would lead outside the arrays.
    if CHECK and tl.load(is_bad) > 0:
        return
    bags, is_bag, start, end, first_id = _load_bag_ranges(fields, offsets, BAGS)
    table, pooling = tl.load(fields), tl.load(fields + 6)
    width, stride = tl.multiple_of(tl.load(fields + 1), ALIGN), tl.multiple_of(tl.load(fields + 5), ALIGN)
    target = out + tl.multiple_of(tl.load(fields + 4), ALIGN)
    address, height = tl.load(addresses + table), tl.load(num_rows + table)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BAGS, BLOCK], tl.float32)
    # False for every bag: a variable must have the same type in all iterations of a Triton loop.
    bad = is_bag & False
    for offset in range(0, tl.max(end - start, 0), _AT_ONCE):
        for unrolled in tl.static_range(_AT_ONCE):
            at = start + offset + unrolled
            is_id = at < end
            row = tl.load(ids + at, is_id, 0).to(tl.int64)
            if CHECK:
                bad = bad | (is_id & ((row < 0) | (row >= height)))
                is_id = is_id & (row >= 0) & (row < height)
            x = _load_rows(address, row, is_id, width, columns, WEIGHT, BITS, ALIGN)
            if WEIGHTED:
                weight = tl.load(sample_weights + at, is_id, 0.0)
                bad = bad | (weight != weight)
            if pooling == _NONE:
                cells = ((at - first_id) * stride)[:, None] + columns[None, :]
                tl.store(
                    target + cells, x.to(out.dtype.element_ty), is_id[:, None] & (columns < width)[None, :]
                )
            else:
                if WEIGHTED:
                    x *= weight[:, None]
                total += x
    if CHECK and tl.max(bad.to(tl.int32), 0) > 0:
        tl.store(is_bad, 1)
    if pooling != _NONE:
        if pooling == _MEAN:
            total = total / tl.maximum(end - start, 1).to(tl.float32)[:, None]
        cells = (bags * stride)[:, None] + columns[None, :]
        tl.store(target + cells, total.to(out.dtype.element_ty), is_bag[:, None] & (columns < width)[None, :])


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
    """Write the entries of this program's bags: row, gradient position, factor and table per ID.

    If several features read the same key, each feature needs its own entries for the key's IDs. So every
    output array is divided into rounds of N entries, and these features are in different rounds. The ID
    at index ``i`` in ``ids`` gets the entry at index ``round * N + i``.

    Args:
        ids: IDs [N].
        offsets: first ID index per bag, followed by N.
        sample_weights: fp32 [N], read if WEIGHTED.
    """
    lookup = tl.program_id(1)
    fields = lookups + lookup * 7
    if tl.program_id(0) * BAGS >= tl.load(fields + 3):
        return
    bags, _is_bag, start, end, first_id = _load_bag_ranges(fields, offsets, BAGS)
    table, stride, pooling = tl.load(fields), tl.load(fields + 5), tl.load(fields + 6)
    target, first_row = tl.load(fields + 4), tl.load(tables + table * 7 + 4)
    entries = tl.load(rounds + lookup) * num_ids
    # The factor that all IDs of a bag share: 1, or 1 / bag size for MEAN.
    shared = tl.full([BAGS], 1.0, tl.float32)
    if pooling == _MEAN:
        shared = 1.0 / tl.maximum(end - start, 1).to(tl.float32)
    for offset in range(0, tl.max(end - start, 0), IDS):
        at = (start + offset)[:, None] + tl.arange(0, IDS)[None, :]
        is_id = at < end[:, None]
        # Entry numbers.
        slot = entries + at
        row = tl.load(ids + at, is_id, 0).to(tl.int64)
        tl.store(rows + slot, (first_row + row).to(rows.dtype.element_ty), is_id)
        tl.store(tables_of + slot, tl.zeros_like(row).to(tl.int32) + table.to(tl.int32), is_id)
        factor = shared[:, None] + tl.zeros([BAGS, IDS], tl.float32)
        if WEIGHTED:
            factor = factor * tl.load(sample_weights + at, is_id, 0.0)
        tl.store(factors + slot, factor, is_id)
        if pooling == _NONE:
            # Without pooling, every ID has a gradient row. Otherwise all IDs in a bag share it.
            tl.store(starts + slot, target + (at - first_id) * stride, is_id)
        else:
            tl.store(starts + slot, target + (bags * stride)[:, None] + tl.zeros_like(at), is_id)


@triton.jit
def run_starts(rows, num_entries, end_of_rows, RUNS: tl.constexpr):
    """Return the positions of this program's entries, their rows, and which entries start a run.

    A run is a sequence of sorted entries with the same row.

    Args:
        rows: row per entry, ascending.
    """
    # int64, because there may be more than 2^31 entries.
    entry = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    row = tl.load(rows + entry, entry < num_entries, end_of_rows).to(tl.int64)
    # -1 before the first entry, so that it starts a run.
    previous = tl.load(rows + entry - 1, (entry > 0) & (entry < num_entries), -1).to(tl.int64)
    return entry, row, (row < end_of_rows) & (previous != row)


@triton.jit
def _sum_part(
    grad,
    rows,
    order,
    starts,
    factors,
    at,
    row,
    active,
    num_entries,
    width,
    ALIGN: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return gradient sums over the entries of runs, from position ``at`` on: fp32 [RUNS, BLOCK].

    A sum ends at the end of the run or at the end of the part, whichever comes first. A run that is not
    ``active`` gets the sum 0.
    """
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([RUNS, BLOCK], tl.float32)
    # Up to the end of the part: sum_parts handles later entries.
    end = tl.where(active, tl.minimum((at // _PART + 1) * _PART, num_entries), 0)
    while tl.max(active.to(tl.int32), 0) > 0:
        for _ in tl.static_range(_AT_ONCE):
            # Rows ascend, so a run ends at the first different row. Triton 3.6 fails if the loop body does
            # not read the variable in the condition.
            active = active & (tl.load(rows + at, at < end, -1).to(tl.int64) == row)
            entry = tl.load(order + at, active, 0)
            start = tl.multiple_of(tl.load(starts + entry, active, 0), [ALIGN])
            x = tl.load(
                grad + start[:, None] + columns[None, :],
                active[:, None] & (columns[None, :] < width[:, None]),
                0.0,
            )
            total += x * tl.load(factors + entry, active, 0.0)[:, None]
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
    """Sum the continuations of runs that span several parts, in parallel.

    A run is a sequence of sorted entries with the same row. The entries are divided into parts with ``_PART``
    entries. If the first entry in a part continues a run from the previous part, the gradients of the run's
    entries in this part are summed to ``parts[part number]``. Otherwise this row of ``parts`` is not written.
    A row read by every sample is thus summed by many programs in parallel.

    Args:
        rows: row per entry, ascending.
        parts: output, fp32 [parts, BLOCK].
    """
    # Part 0 has no previous part, so program 0 starts with part 1.
    part = tl.program_id(0).to(tl.int64) * PARTS + tl.arange(0, PARTS) + 1
    at = part * _PART
    row = tl.load(rows + at, at < num_entries, end_of_rows).to(tl.int64)
    before = tl.load(rows + at - 1, at < num_entries, end_of_rows).to(tl.int64)
    active = (row < end_of_rows) & (before == row)
    if tl.max(active.to(tl.int32), 0) == 0:
        return
    table = tl.load(tables_of + tl.load(order + at, active, 0), active, 0)
    width = tl.load(tables + table * 7 + 3, active, 0)
    total = _sum_part(
        grad, rows, order, starts, factors, at, row, active, num_entries, width, ALIGN, PARTS, BLOCK
    )
    tl.store(parts + (part * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :], total, active[:, None])


@triton.jit
def load_run_sums(
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
    """Return the gradient sums of the runs that start at this program's entries: fp32 [RUNS, BLOCK].

    An entry is an ID read by a feature. A run is a sequence of sorted entries with the same row.

    Args:
        rows: row per entry, ascending.
        at: positions of this program's entries in sorted order, int64 [RUNS].
        row: row per entry, [RUNS].
        first: whether a run starts at the entry, [RUNS]. If not, the result is 0.
        width: row width per entry, [RUNS].
    """
    total = _sum_part(
        grad, rows, order, starts, factors, at, row, first, num_entries, width, ALIGN, RUNS, BLOCK
    )
    columns = tl.arange(0, BLOCK)
    # Add the parts that continue the run. Always in part order, so that the sum is the same in every run.
    part, active = at // _PART + 1, first
    end = tl.where(first, (num_entries + _PART - 1) // _PART, 0)
    while tl.max(active.to(tl.int32), 0) > 0:
        for _ in tl.static_range(_AT_ONCE):
            # The run continues in a part exactly if the part starts with the same row. For such a part,
            # sum_parts has written a sum.
            active = active & (tl.load(rows + part * _PART, part < end, -1).to(tl.int64) == row)
            total += tl.load(parts + (part * BLOCK)[:, None] + columns[None, :], active[:, None], 0.0)
            part += 1
    return total


@triton.jit
def write_run_sums(
    grad,
    rows,
    order,
    starts,
    factors,
    tables_of,
    tables,
    parts,
    run_ids,
    num_entries,
    end_of_rows,
    DENSE: tl.constexpr,
    ALIGN: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient sum of every run, and unless DENSE, the row number of the run.

    An entry is an ID read by a feature. A run is a sequence of sorted entries with the same row. The outputs
    are the tensors whose addresses stand in the state slots of ``tables``: gradient sums in the first slot,
    row numbers in the second. With DENSE, the output has all rows of the table, and a sum is written at the
    row's position. Otherwise it is written at the position ``run_ids``.

    Args:
        rows: row per entry, ascending.
        tables: ``TABLE_FIELDS`` per table, int64; the state slot addresses are those of the outputs.
        run_ids: run number within the table, for every sorted entry. Not read with DENSE.
    """
    at, row, first = run_starts(rows, num_entries, end_of_rows, RUNS)
    # No run starts here: another program sums these entries.
    if tl.max(first.to(tl.int32), 0) == 0:
        return
    fields = tables + tl.load(tables_of + tl.load(order + at, first, 0), first, 0) * 7
    width = tl.load(fields + 3, first, 0)
    total = load_run_sums(
        grad, rows, order, starts, factors, parts, at, row, first, num_entries, width, ALIGN, RUNS, BLOCK
    )
    columns = tl.arange(0, BLOCK)
    # The row within the table.
    local = row - tl.load(fields + 4, first, 0)
    if DENSE:
        target_row = local
    else:
        target_row = tl.load(run_ids + at, first, 0)
        # Row numbers go to the address in the second state slot field.
        tl.store(tl.load(fields + 2, first, 0).to(tl.pointer_type(tl.int64)) + target_row, local, first)
    # Sums go to the address in the first state slot field.
    sums = tl.load(fields + 1, first, 0).to(tl.pointer_type(tl.float32))
    elements = (sums + target_row * width)[:, None] + columns[None, :]
    tl.store(elements, total, first[:, None] & (columns[None, :] < width[:, None]))
