"""The Triton kernels that route IDs and bring rows back; ``triton.py`` launches them.

Every kernel walks bags, not IDs: one lane (or one program) owns a bag and visits its IDs in order. So the
place of an ID in a message is the number of IDs before its bag, from a running sum, plus those that the lane
has already seen. No kernel needs atomic positions or a sort, and results do not depend on scheduling.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

import triton
import triton.language as tl

ROUTE_FIELDS = 10
"""The number of fields of a route.

Rank, use, first row, end row, rows of the table, whether it is the first route of its use, its index among
the routes of its rank; first bag of its key, number of bags, first slot. A slot is a bag of a route; slots
are numbered route by route.
"""
RANK_FIELDS = 5
"""The fields of a rank: first slot, end slot, words of the message before its IDs, these words summed over
the ranks before it, bags per route (-1: they differ).
"""
SEQUENCE_FIELDS = 6
"""The fields of a sequence lookup: route, first column, width, first element in the message, first element of
the use in the result, width of the use.
"""

_FIELDS: tl.constexpr = tl.constexpr(ROUTE_FIELDS)
_RANK_FIELDS: tl.constexpr = tl.constexpr(RANK_FIELDS)


@triton.jit
def _bags(fields, offsets, lanes, inside, num_ids):
    """Return the start and end of the IDs of some bags. Both are kept inside the tensor, because offsets may
    be invalid.
    """
    at = offsets + tl.load(fields + 7) + lanes
    begin = tl.load(at, inside, 0).to(tl.int64)
    end = tl.load(at + 1, inside, 0).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, 0), num_ids)
    return begin, tl.minimum(tl.maximum(end, begin), num_ids)


@triton.jit
def count_ids(
    routes,
    ids,
    offsets,
    weights,
    num_ids,
    lengths,
    num_bad,
    is_bad,
    WEIGHTED: tl.constexpr,
    CHECK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the number of IDs that each slot's route takes, and count the IDs outside the table of each use.

    With CHECK, such an ID or a NaN weight sets is_bad.
    """
    fields = routes + tl.program_id(1) * _FIELDS
    bags = tl.load(fields + 8)
    if tl.program_id(0) * BLOCK >= bags:
        return
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < bags
    first_row, end_row, rows = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
    begin, end = _bags(fields, offsets, lanes, inside, num_ids)
    count = tl.zeros([BLOCK], tl.int32)
    outside = tl.zeros([BLOCK], tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for i in range(tl.max(tl.where(inside, end - begin, 0), 0)):
        has = inside & (begin + i < end)
        row = tl.load(ids + begin + i, has, 0).to(tl.int64)
        bad = (row < 0) | (row >= rows)
        row = tl.where(bad, 0, row)
        count += (has & (row >= first_row) & (row < end_row)).to(tl.int32)
        outside += (has & bad).to(tl.int32)
        if WEIGHTED and CHECK:
            weight = tl.load(weights + begin + i, has, 0.0)
            wrong += (has & (weight != weight)).to(tl.int32)
    tl.store(lengths + tl.load(fields + 9) + lanes, count, inside)
    if tl.load(fields + 5) != 0:  # several routes see the same IDs; only one counts them
        num_outside = tl.sum(outside, 0)
        tl.atomic_add(num_bad + tl.load(fields + 1), num_outside.to(tl.int64))
        if CHECK:
            if num_outside + tl.sum(wrong, 0) > 0:
                tl.store(is_bad, 1)


@triton.jit
def write_header(
    routes, ranks, starts, is_bad, header, counts, num_routes, num_ranks, words_per_id, BLOCK: tl.constexpr
):
    """Write the header of each message and the number of IDs on each route."""
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < num_routes
    fields = routes + lanes * _FIELDS
    slot, bags = tl.load(fields + 9, inside, 0), tl.load(fields + 8, inside, 0)
    first = tl.load(starts + slot, inside, 0)
    tl.store(counts + lanes, tl.load(starts + slot + bags, inside, 0) - first, inside)
    inside = lanes < num_ranks
    fields = ranks + lanes * _RANK_FIELDS
    first = tl.load(starts + tl.load(fields, inside, 0), inside, 0)
    num_ids = tl.load(starts + tl.load(fields + 1, inside, 0), inside, 0) - first
    words = tl.load(fields + 2, inside, 0) + num_ids * words_per_id
    status = tl.load(is_bad).to(tl.int64) + tl.zeros([BLOCK], tl.int64)
    tl.store(header + lanes * 4, status, inside)
    tl.store(header + lanes * 4 + 1, words, inside)
    tl.store(header + lanes * 4 + 2, num_ids, inside)
    tl.store(header + lanes * 4 + 3, tl.load(fields + 4, inside, 0), inside)


@triton.jit
def write_messages(
    routes,
    ranks,
    starts,
    ids,
    offsets,
    weights,
    num_ids,
    num_slots,
    capacity,
    words,
    words_per_id,
    WEIGHTED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the part of each route in the message for its rank."""
    fields = routes + tl.program_id(1) * _FIELDS
    bags = tl.load(fields + 8)
    # Decreasing offsets make bags overlap, and the messages too long. The header reports them.
    if (tl.load(starts + num_slots) > capacity) | (tl.program_id(0) * BLOCK >= tl.maximum(bags, 1)):
        return
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < bags
    first_row, end_row, rows = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
    slots = tl.load(fields + 9) + lanes
    rank = ranks + tl.load(fields) * _RANK_FIELDS
    first_slot = tl.load(rank)
    first_id = tl.load(starts + first_slot)
    ids_of_rank = tl.load(starts + tl.load(rank + 1)) - first_id
    message = words + tl.load(rank + 3) + first_id * words_per_id
    ids_at = message + tl.load(rank + 2)
    before = tl.load(starts + slots, inside, 0)
    if (tl.load(rank + 4) < 0) & (tl.program_id(0) == 0):
        tl.store(message + tl.load(fields + 6), bags.to(tl.int32))
    lengths_at = ids_at - (tl.load(rank + 1) - first_slot)
    length = tl.load(starts + slots + 1, inside, 0) - before
    tl.store(lengths_at + slots - first_slot, length.to(tl.int32), inside)
    place = before - first_id
    begin, end = _bags(fields, offsets, lanes, inside, num_ids)
    for i in range(tl.max(tl.where(inside, end - begin, 0), 0)):
        has = inside & (begin + i < end)
        row = tl.load(ids + begin + i, has, 0).to(tl.int64)
        row = tl.where((row < 0) | (row >= rows), 0, row)
        taken = has & (row >= first_row) & (row < end_row)
        row -= first_row
        if WIDE:
            # Messages are int32 words, and a message may begin at an odd one: no aligned int64 store.
            tl.store(ids_at + 2 * place, row.to(tl.int32), taken)
            tl.store(ids_at + 2 * place + 1, (row >> 32).to(tl.int32), taken)
        else:
            tl.store(ids_at + place, row.to(tl.int32), taken)
        if WEIGHTED:
            weight = tl.load(weights + begin + i, taken, 0.0)
            at = ids_at + ids_of_rank * (words_per_id - 1) + place
            tl.store(at, weight.to(tl.int32, bitcast=True), taken)
        place += taken.to(tl.int64)


@triton.jit
def unpack_messages(
    blocks, received, lengths, values, weights, WEIGHTED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy the lengths, IDs and weights of each message to their places.

    ``blocks`` [n, 6]: first word of the lengths, bags, first word of the IDs, IDs, first bag, first ID.
    """
    fields = blocks + tl.program_id(1) * 6
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < tl.load(fields + 1)
    length = tl.load(received + tl.load(fields) + lanes, inside, 0)
    tl.store(lengths + tl.load(fields + 4) + lanes, length, inside)
    num_ids, first = tl.load(fields + 3), tl.load(fields + 5)
    inside = lanes < num_ids
    ids = received + tl.load(fields + 2)
    if WIDE:
        low = tl.load(ids + 2 * lanes, inside, 0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(ids + 2 * lanes + 1, inside, 0).to(tl.int64)
        tl.store(values + first + lanes, (high << 32) | low, inside)
        ids += num_ids
    else:
        tl.store(values + first + lanes, tl.load(ids + lanes, inside, 0), inside)
    if WEIGHTED:
        weight = tl.load(ids + num_ids + lanes, inside, 0)
        tl.store(weights + first + lanes, weight.to(tl.float32, bitcast=True), inside)


@triton.jit
def _inverse_lengths(offsets, first_bags, use, lanes, inside):
    """Return one over the number of IDs in each bag that a use reads; 0 for empty bags."""
    at = offsets + tl.load(first_bags + use) + lanes
    length = (tl.load(at + 1, inside, 0) - tl.load(at, inside, 0)).to(tl.float32)
    return tl.where(length > 0, 1.0 / tl.where(length > 0, length, 1.0), 0.0)


@triton.jit
def gather_columns(
    groups,
    parts,
    first_columns,
    received,
    local,
    offsets,
    first_bags,
    out,
    batch,
    num_sources,
    local_dim,
    out_dim,
    MEANS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the parts of one group of columns, in their order.

    ``groups`` [G, 4]: first column, width, first part, parts. ``parts`` [., 3]: source, first column in the
    source, use by whose bag lengths to divide or -1. ``first_columns`` [S + 1]: the columns of the sources
    before each one.
    """
    group = groups + tl.program_id(1) * 4
    column, width, first, num_parts = (
        tl.load(group),
        tl.load(group + 1),
        tl.load(group + 2),
        tl.load(group + 3),
    )
    lanes = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    rows = lanes.to(tl.int64)[:, None]
    inside = (lanes < batch)[:, None] & (columns < width)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for number in range(num_parts):
        part = parts + (first + number) * 3
        source, start, use = tl.load(part), tl.load(part + 1), tl.load(part + 2)
        at = start + columns[None, :]
        if source == num_sources:
            x = tl.load(local + rows * local_dim + at, inside, 0.0)
        else:
            before = tl.load(first_columns + source)
            dim = tl.load(first_columns + source + 1) - before
            x = tl.load(received + before * batch + rows * dim + at, inside, 0.0).to(tl.float32)
        if MEANS:
            if use >= 0:
                x = x * _inverse_lengths(offsets, first_bags, use, lanes, lanes < batch)[:, None]
        total += x
    tl.store(out + rows * out_dim + column + columns[None, :], total, inside)


@triton.jit
def scatter_columns(
    pieces,
    first_columns,
    grad,
    offsets,
    first_bags,
    scale,
    sent,
    local,
    batch,
    num_sources,
    local_dim,
    out_dim,
    MEANS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the columns of one piece of the gradient to its source, times ``scale``.

    ``pieces`` [P, 5]: source, first column there, width, first column of the gradient, use as in ``gather``.
    """
    piece = pieces + tl.program_id(1) * 5
    source, start, width = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    column, use = tl.load(piece + 3), tl.load(piece + 4)
    lanes = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    rows = lanes.to(tl.int64)[:, None]
    inside = (lanes < batch)[:, None] & (columns < width)[None, :]
    x = tl.load(grad + rows * out_dim + column + columns[None, :], inside, 0.0) * scale
    if MEANS:
        if use >= 0:
            x = x * _inverse_lengths(offsets, first_bags, use, lanes, lanes < batch)[:, None]
    at = start + columns[None, :]
    if source == num_sources:
        tl.store(local + rows * local_dim + at, x, inside)
    else:
        before = tl.load(first_columns + source)
        dim = tl.load(first_columns + source + 1) - before
        tl.store(sent + before * batch + rows * dim + at, x.to(sent.dtype.element_ty), inside)


@triton.jit
def copy_sequences(
    lookups,
    routes,
    starts,
    ids,
    offsets,
    num_ids,
    source,
    target,
    scale,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the rows of one bag of one lookup between the message and the rows by ID.

    With GATHER, copy from the message; otherwise copy to it, times ``scale``. ``lookups`` [L, 6]:
    ``SEQUENCE_FIELDS``.
    """
    lookup = lookups + tl.program_id(1) * 6
    fields = routes + tl.load(lookup) * _FIELDS
    bag = tl.program_id(0)
    if bag >= tl.load(fields + 8):
        return
    first_row, end_row, rows = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
    width, use_width = tl.load(lookup + 2), tl.load(lookup + 5)
    first_bag, slot = tl.load(fields + 7), tl.load(fields + 9)
    first_id = tl.load(offsets + first_bag).to(tl.int64)
    begin, end = tl.load(offsets + first_bag + bag), tl.load(offsets + first_bag + bag + 1)
    travels = tl.load(lookup + 3) + (tl.load(starts + slot + bag) - tl.load(starts + slot)) * width
    by_id = tl.load(lookup + 4) + (begin.to(tl.int64) - first_id) * use_width + tl.load(lookup + 1)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    for i in range(begin, end):
        row = tl.load(ids + i).to(tl.int64)
        row = tl.where((row < 0) | (row >= rows), 0, row)
        if (row >= first_row) & (row < end_row):
            if GATHER:
                x = tl.load(source + travels + columns, inside, 0.0).to(tl.float32)
                tl.store(target + by_id + columns, x, inside)
            else:
                x = tl.load(source + by_id + columns, inside, 0.0) * scale
                tl.store(target + travels + columns, x.to(target.dtype.element_ty), inside)
            travels += width
        by_id += use_width


@triton.jit
def sum_weight_grads(
    keys, routes_of_keys, routes, starts, ids, offsets, num_ids, received, out, BLOCK: tl.constexpr
):
    """Add up, for each ID of a key, the values that came back on its routes, in the order of routes.

    ``keys`` [., 2]: first of its routes in ``routes_of_keys``, number of routes.
    """
    key = keys + tl.program_id(1) * 2
    first, num_routes = tl.load(key), tl.load(key + 1)
    fields = routes + tl.load(routes_of_keys + first) * _FIELDS
    bags = tl.load(fields + 8)
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < bags
    begin, end = _bags(fields, offsets, lanes, inside, num_ids)
    longest = tl.max(tl.where(inside, end - begin, 0), 0)
    for number in range(num_routes):
        fields = routes + tl.load(routes_of_keys + first + number) * _FIELDS
        first_row, end_row, rows = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
        place = tl.load(starts + tl.load(fields + 9) + lanes, inside, 0)
        for i in range(longest):
            has = inside & (begin + i < end)
            row = tl.load(ids + begin + i, has, 0).to(tl.int64)
            row = tl.where((row < 0) | (row >= rows), 0, row)
            taken = has & (row >= first_row) & (row < end_row)
            x = tl.load(received + place, taken, 0.0)
            # Only this lane writes the bag, so it may add to what it wrote for the previous route.
            tl.store(out + begin + i, tl.load(out + begin + i, taken, 0.0) + x, taken)
            place += taken.to(tl.int64)
