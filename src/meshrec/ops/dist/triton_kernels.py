"""Triton kernels that route IDs and return rows; ``triton.py`` launches them.

All kernels loop over bags, not over IDs: a lane (or a program) handles a bag, and visits its IDs in order. A
slot is a bag on a route. The position of an ID in a message is the number of IDs in earlier slots, from a
prefix sum, plus the number of IDs that the lane has already visited. No kernel needs atomic counters or a
sort to find positions, and results do not depend on scheduling.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

import triton
import triton.language as tl

ROUTE_FIELDS = 10
"""Number of integers that describe a route.

From the plan: rank, use, first row, end row, rows of the table, whether it is the first route of the use,
index among the routes to the rank. From the batch: first bag of the key, number of bags, first slot. Slots
are numbered route by route.
"""
RANK_FIELDS = 5
"""Number of integers that describe the message to a rank.

First slot, end slot, number of words before the IDs, sum of these over the previous ranks, bags per route
(-1: they differ).
"""
SEQUENCE_FIELDS = 6
"""Number of integers that describe a sequence lookup.

Route, first column, width, first element in the message, first element of the use in the result, row width of
the use.
"""

_FIELDS: tl.constexpr = tl.constexpr(ROUTE_FIELDS)
_RANK_FIELDS: tl.constexpr = tl.constexpr(RANK_FIELDS)


@triton.jit
def _load_bag_ranges(fields, offsets, lanes, inside, num_ids):
    """Return start and end position of the IDs in every bag, clamped because offsets may be invalid."""
    at = offsets + tl.load(fields + 7) + lanes
    start = tl.load(at, inside, 0).to(tl.int64)
    end = tl.load(at + 1, inside, 0).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), num_ids)
    return start, tl.minimum(tl.maximum(end, start), num_ids)


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
    """Count the IDs per slot, and for every use the IDs outside the table.

    A use is a pair of a feature and a table. A route connects a use to a shard. A slot is a bag on a route.
    With CHECK, an ID outside the table or a NaN weight sets ``is_bad``.

    Args:
        ids: IDs [N].
        offsets: first ID index per bag, followed by N.
        weights: fp32 [N], read if WEIGHTED.
        is_bad: output flag, int32 [1].
    """
    # A program handles a route and a range of bags.
    fields = routes + tl.program_id(1) * _FIELDS
    bags = tl.load(fields + 8)
    if tl.program_id(0) * BLOCK >= bags:
        return
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < bags
    # Row range in the shard, and row count in the table.
    first_row, end_row, rows = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
    start, end = _load_bag_ranges(fields, offsets, lanes, inside, num_ids)
    # A counter per bag.
    count = tl.zeros([BLOCK], tl.int32)
    outside = tl.zeros([BLOCK], tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for i in range(tl.max(tl.where(inside, end - start, 0), 0)):
        is_id = inside & (start + i < end)
        row = tl.load(ids + start + i, is_id, 0).to(tl.int64)
        bad = (row < 0) | (row >= rows)
        # IDs outside the table read row 0, which some route must take.
        row = tl.where(bad, 0, row)
        count += (is_id & (row >= first_row) & (row < end_row)).to(tl.int32)
        outside += (is_id & bad).to(tl.int32)
        if WEIGHTED and CHECK:
            weight = tl.load(weights + start + i, is_id, 0.0)
            wrong += (is_id & (weight != weight)).to(tl.int32)
    # Slots on a route are adjacent, so lane i writes slot i of the route.
    tl.store(lengths + tl.load(fields + 9) + lanes, count, inside)
    if tl.load(fields + 5) != 0:  # several routes see the same IDs; only the first counts them
        num_outside = tl.sum(outside, 0)
        # Integers, so the order of programs does not matter.
        tl.atomic_add(num_bad + tl.load(fields + 1), num_outside.to(tl.int64))
        if CHECK:
            if num_outside + tl.sum(wrong, 0) > 0:
                tl.store(is_bad, 1)


@triton.jit
def write_header(
    routes, ranks, starts, is_bad, header, counts, num_routes, num_ranks, words_per_id, BLOCK: tl.constexpr
):
    """Write the header of every message, and the ID count of every route.

    Args:
        starts: ID count before every slot, int64.
        is_bad: input flag, int32 [1].
        header: output, int64 [R, 4].
    """
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < num_routes
    # A lane is a route here, and a rank further below.
    fields = routes + lanes * _FIELDS
    slot, bags = tl.load(fields + 9, inside, 0), tl.load(fields + 8, inside, 0)
    first = tl.load(starts + slot, inside, 0)
    tl.store(counts + lanes, tl.load(starts + slot + bags, inside, 0) - first, inside)
    inside = lanes < num_ranks
    fields = ranks + lanes * _RANK_FIELDS
    first = tl.load(starts + tl.load(fields, inside, 0), inside, 0)
    num_ids = tl.load(starts + tl.load(fields + 1, inside, 0), inside, 0) - first
    words = tl.load(fields + 2, inside, 0) + num_ids * words_per_id
    # The same status in all headers, so that all ranks see it.
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
    """Write the IDs on every route to the message for the rank of the route.

    Args:
        starts: ID count before every slot, int64.
        ids: IDs [N].
        offsets: first ID index per bag, followed by N.
        weights: fp32 [N], read if WEIGHTED.
        capacity: maximum number of IDs in ``words``.
        WIDE: whether IDs are int64.
    """
    fields = routes + tl.program_id(1) * _FIELDS
    bags = tl.load(fields + 8)
    # Decreasing offsets make bags overlap and messages overflow. The header's status reports them.
    # On a route without bags, program 0 still writes the bag count.
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
    # Earlier messages take their words before the IDs, and words_per_id words for every ID.
    message = words + tl.load(rank + 3) + first_id * words_per_id
    ids_at = message + tl.load(rank + 2)
    before = tl.load(starts + slots, inside, 0)
    if (tl.load(rank + 4) < 0) & (tl.program_id(0) == 0):
        # The first program of a route writes the bag count at the front of the message.
        tl.store(message + tl.load(fields + 6), bags.to(tl.int32))
    # There is a bag length per slot, right before the IDs.
    lengths_at = ids_at - (tl.load(rank + 1) - first_slot)
    length = tl.load(starts + slots + 1, inside, 0) - before
    tl.store(lengths_at + slots - first_slot, length.to(tl.int32), inside)
    position = before - first_id
    start, end = _load_bag_ranges(fields, offsets, lanes, inside, num_ids)
    for i in range(tl.max(tl.where(inside, end - start, 0), 0)):
        is_id = inside & (start + i < end)
        row = tl.load(ids + start + i, is_id, 0).to(tl.int64)
        # IDs outside the table read row 0, as in naive.
        row = tl.where((row < 0) | (row >= rows), 0, row)
        is_taken = is_id & (row >= first_row) & (row < end_row)
        row -= first_row
        if WIDE:
            # A message may start at an odd int32 word, so int64 stores would be misaligned.
            tl.store(ids_at + 2 * position, row.to(tl.int32), is_taken)
            tl.store(ids_at + 2 * position + 1, (row >> 32).to(tl.int32), is_taken)
        else:
            tl.store(ids_at + position, row.to(tl.int32), is_taken)
        if WEIGHTED:
            weight = tl.load(weights + start + i, is_taken, 0.0)
            at = ids_at + ids_of_rank * (words_per_id - 1) + position
            tl.store(at, weight.to(tl.int32, bitcast=True), is_taken)
        position += is_taken.to(tl.int64)


@triton.jit
def unpack_messages(
    blocks,
    received,
    lengths,
    values,
    weights,
    WEIGHTED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the bag lengths, IDs and weights of every message to the tensors of a batch.

    Args:
        blocks: int64 [n, 6] per message: first length word, number of bags, first ID word, number of IDs,
            first bag and first ID in the result.
        WIDE: whether IDs are int64.
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
        # Two words, because a message may start at an odd word.
        low = tl.load(ids + 2 * lanes, inside, 0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(ids + 2 * lanes + 1, inside, 0).to(tl.int64)
        tl.store(values + first + lanes, (high << 32) | low, inside)
        # Weights follow the wide IDs, which take two words each.
        ids += num_ids
    else:
        tl.store(values + first + lanes, tl.load(ids + lanes, inside, 0), inside)
    if WEIGHTED:
        weight = tl.load(ids + num_ids + lanes, inside, 0)
        tl.store(weights + first + lanes, weight.to(tl.float32, bitcast=True), inside)


@triton.jit
def _inverse_lengths(offsets, first_bags, use, lanes, inside):
    """Return 1 / (number of IDs) for every bag that a use reads; 0 for empty bags."""
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
    """Write a group of output columns: the sum over the parts of the group, in order.

    A source is a rank that sends pooled columns, or ``local``. A part is a range of columns in a source. For
    mean pooling, a part is divided by the bag lengths of a use (a pair of feature and table).

    Args:
        groups: int64 [G, 4]: first column, width, first part, number of parts.
        parts: int64 [number of parts, 3]: source, first column in the source, and the use by whose bag
            lengths to divide (-1: none).
        first_columns: int64 [S + 1]: number of columns in the sources before each source.
        local: pooled rows from tables on this rank, [B, local_dim].
        offsets: first ID index per bag, followed by N; read if MEANS.
        first_bags: first bag per use, read if MEANS.
        out: output, fp32 [B, out_dim].
        num_sources: rank count; also the source number for ``local``.
    """
    # A program handles a column group and a range of rows.
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
        source, source_column, use = tl.load(part), tl.load(part + 1), tl.load(part + 2)
        source_columns = source_column + columns[None, :]
        if source == num_sources:
            x = tl.load(local + rows * local_dim + source_columns, inside, 0.0)
        else:
            # A source is a matrix [B, dim], and the sources are end to end.
            source_start = tl.load(first_columns + source)
            dim = tl.load(first_columns + source + 1) - source_start
            x = tl.load(received + source_start * batch + rows * dim + source_columns, inside, 0.0).to(
                tl.float32
            )
        if MEANS:
            if use >= 0:
                x = x * _inverse_lengths(offsets, first_bags, use, lanes, lanes < batch)[:, None]
        # In part order, so the sum is the same in every run.
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
    """Copy the gradient columns of a piece to the rank that sends the piece, multiplied by ``scale``.

    Args:
        pieces: int64 [P, 5]: source, first column in the source, width, first gradient column, and the use by
            whose bag lengths to divide (-1: none).
        first_columns: int64 [S + 1]: number of columns in the sources before each source.
        grad: fp32 [B, out_dim].
        offsets: first ID index per bag, followed by N; read if MEANS.
        first_bags: first bag per use, read if MEANS.
        local: output for tables on this rank, fp32 [B, local_dim].
        num_sources: rank count; also the source number for ``local``.
    """
    # A program handles a piece and a range of rows.
    piece = pieces + tl.program_id(1) * 5
    source, source_column, width = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    column, use = tl.load(piece + 3), tl.load(piece + 4)
    lanes = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    rows = lanes.to(tl.int64)[:, None]
    inside = (lanes < batch)[:, None] & (columns < width)[None, :]
    x = tl.load(grad + rows * out_dim + column + columns[None, :], inside, 0.0) * scale
    if MEANS:
        if use >= 0:
            x = x * _inverse_lengths(offsets, first_bags, use, lanes, lanes < batch)[:, None]
    source_columns = source_column + columns[None, :]
    if source == num_sources:
        tl.store(local + rows * local_dim + source_columns, x, inside)
    else:
        source_start = tl.load(first_columns + source)
        dim = tl.load(first_columns + source + 1) - source_start
        tl.store(
            sent + source_start * batch + rows * dim + source_columns, x.to(sent.dtype.element_ty), inside
        )


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
    """Copy the rows for a bag between the message from all ranks and a tensor with the rows in ID order.

    A program handles a bag in a lookup. A lookup has a range of columns of the rows on a route.

    Args:
        lookups: int64 [L, 6]: ``SEQUENCE_FIELDS``.
        starts: ID count before every slot, int64.
        ids: IDs [N].
        offsets: first ID index per bag, followed by N.
        source: message if GATHER, else gradient rows in ID order.
        target: output. Rows in ID order if GATHER, else the message.
    """
    # A program handles a bag in a lookup.
    lookup = lookups + tl.program_id(1) * 6
    fields = routes + tl.load(lookup) * _FIELDS
    bag = tl.program_id(0)
    if bag >= tl.load(fields + 8):
        return
    first_row, end_row, rows = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
    width, use_width = tl.load(lookup + 2), tl.load(lookup + 5)
    first_bag, slot = tl.load(fields + 7), tl.load(fields + 9)
    first_id = tl.load(offsets + first_bag).to(tl.int64)
    start, end = tl.load(offsets + first_bag + bag), tl.load(offsets + first_bag + bag + 1)
    message_element = tl.load(lookup + 3) + (tl.load(starts + slot + bag) - tl.load(starts + slot)) * width
    row_element = tl.load(lookup + 4) + (start.to(tl.int64) - first_id) * use_width + tl.load(lookup + 1)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    # The message has only IDs in the row range of the route. The result has all IDs.
    # The offsets need no clamping: routing has rejected invalid ones.
    for i in range(start, end):
        row = tl.load(ids + i).to(tl.int64)
        row = tl.where((row < 0) | (row >= rows), 0, row)
        if (row >= first_row) & (row < end_row):
            if GATHER:
                x = tl.load(source + message_element + columns, inside, 0.0).to(tl.float32)
                tl.store(target + row_element + columns, x, inside)
            else:
                x = tl.load(source + row_element + columns, inside, 0.0) * scale
                tl.store(target + message_element + columns, x.to(target.dtype.element_ty), inside)
            message_element += width
        row_element += use_width


@triton.jit
def sum_weight_grads(
    keys, routes_of_keys, routes, starts, ids, offsets, num_ids, received, out, BLOCK: tl.constexpr
):
    """Sum the gradients that the routes of a key returned for every ID, in route order.

    Args:
        keys: int64 [., 2]: first entry in ``routes_of_keys``, number of routes.
        starts: ID count before every slot, int64.
        ids: IDs [N].
        offsets: first ID index per bag, followed by N.
        out: output, fp32 [N], zeros.
    """
    # A program handles a key and a range of bags.
    key = keys + tl.program_id(1) * 2
    first, num_routes = tl.load(key), tl.load(key + 1)
    # All routes with this key have the same bags, so take them from the first route.
    fields = routes + tl.load(routes_of_keys + first) * _FIELDS
    bags = tl.load(fields + 8)
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < bags
    start, end = _load_bag_ranges(fields, offsets, lanes, inside, num_ids)
    # Lanes advance together, until the longest bag ends.
    max_length = tl.max(tl.where(inside, end - start, 0), 0)
    for number in range(num_routes):
        fields = routes + tl.load(routes_of_keys + first + number) * _FIELDS
        first_row, end_row, rows = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
        position = tl.load(starts + tl.load(fields + 9) + lanes, inside, 0)
        for i in range(max_length):
            is_id = inside & (start + i < end)
            row = tl.load(ids + start + i, is_id, 0).to(tl.int64)
            row = tl.where((row < 0) | (row >= rows), 0, row)
            is_taken = is_id & (row >= first_row) & (row < end_row)
            x = tl.load(received + position, is_taken, 0.0)
            # Only this lane writes the bag, so it can add to the previous route's value without atomics.
            tl.store(out + start + i, tl.load(out + start + i, is_taken, 0.0) + x, is_taken)
            position += is_taken.to(tl.int64)
