"""The kernel of the gradients of biases; see [Note: tiles of attention on GPUs] in ``triton_kernels.py``."""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

import triton
import triton.language as tl

from meshrec.ops.attention.triton_kernels import (
    key_blocks,
    load_grads,
    load_keys,
    load_queries,
    load_values,
    nth,
    of_scores,
    pairs,
    sample_of,
    times_of_queries,
)


@triton.jit
def _sums_by_distance(tile, least, BLOCK: tl.constexpr):
    """Sum a tile over the pairs whose key minus query is ``least`` to ``least + BLOCK - 1``."""
    key = tl.arange(0, BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :] + least
    inside = (key >= 0) & (key < BLOCK)
    return tl.sum(tl.where(inside, tl.gather(tile, tl.where(inside, key, 0), 1), 0.0), 0)


@triton.jit
def _with_sums_by_bucket(histogram, tile, buckets, seen, num_buckets, BUCKETS: tl.constexpr):
    """Add the sums of a tile by bucket to a histogram, one bucket after the other."""
    low = tl.min(tl.min(tl.where(seen, buckets, num_buckets), 1), 0)
    high = tl.max(tl.max(tl.where(seen, buckets, -1), 1), 0)
    for bucket in range(low, high + 1):
        found = tl.sum(tl.sum(tl.where(buckets == bucket, tile, 0.0), 1), 0)
        histogram += tl.where(tl.arange(0, BUCKETS) == bucket, found, 0.0)
    return histogram


@triton.jit
def _sum_of_heads(
    tokens,
    results,
    rows,
    keys,
    shared,
    SOFTMAX: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Sum the gradients of a tile's scores over the heads."""
    first_query, index, is_row = rows
    first, column, is_key = keys
    bias, seen, max_length = shared
    sums = tl.zeros([BLOCK, BLOCK], tl.float32)
    for head in range(tokens.num_heads):
        queries_BQ = load_queries(tokens, head, first_query, index, is_row, QUERY_WIDTH)
        grads_BV = load_grads(results.grad, tokens, head, first_query, index, is_row, VALUE_WIDTH)
        keys_BQ = load_keys(tokens, head, first, column, is_key, QUERY_WIDTH)
        values_BV = load_values(tokens, head, first, column, is_key, VALUE_WIDTH)
        score = tl.dot(queries_BQ, tl.trans(keys_BQ), input_precision=PRECISION) * tokens.scale + bias
        of_weight = tl.dot(grads_BV, tl.trans(values_BV), input_precision=PRECISION)
        at = (first_query + index) * tokens.num_heads + head
        _, of_score = of_scores(score, of_weight, seen, results, at, is_row, max_length, SOFTMAX)
        sums += of_score
    return sums


@triton.jit
def of_biases(
    tokens,
    samples,
    biases,
    results,
    parts,
    first_sample,
    SOFTMAX: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    """Write the part of a block of queries, all heads, in the gradient of the time bias, or, if BUCKETS is 0,
    of the position bias. (Triton does not end compiling a kernel of both.)

    The part of positions has two rows of 2 max_length - 1 zeros. A tile writes the lower half of its
    distances into one row and the upper half into the other, so that no two tiles write the same number.
    """
    program, num_blocks = tl.program_id(0), samples.num_blocks
    first, length, history, first_query, queries = sample_of(samples, first_sample + program // num_blocks)
    begin = program % num_blocks * BLOCK
    if begin >= queries:
        return
    lanes, before = tl.arange(0, BLOCK), length - queries
    index = begin + lanes
    is_row, row = index < queries, index + before
    rows = first_query, index, is_row
    times = times_of_queries(biases, first, row, is_row, history)
    end = tl.minimum(begin + BLOCK, queries)
    contextual, past, num_before, own, num = key_blocks(
        begin + before, end + before, length, history, CAUSAL, WINDOW, CONTEXTUAL, BLOCK
    )
    if BUCKETS:
        histogram = tl.zeros([BUCKETS], tl.float32)
    else:
        num_positions = 2 * biases.max_length - 1
        positions = parts + 2 * program.to(tl.int64) * num_positions
    for n in range(num):
        first_column = nth(n, contextual, past, num_before, own) * BLOCK
        column = first_column + lanes
        bias, buckets, seen = pairs(
            biases, first, length, history, row, is_row, times, column, CAUSAL, WINDOW, CONTEXTUAL
        )
        keys, shared = (first, column, column < length), (bias, seen, biases.max_length)
        sums = _sum_of_heads(
            tokens, results, rows, keys, shared, SOFTMAX, PRECISION, BLOCK, QUERY_WIDTH, VALUE_WIDTH
        )
        if BUCKETS:
            histogram = _with_sums_by_bucket(histogram, sums, buckets, seen, biases.num_buckets, BUCKETS)
        else:
            # The place of the smallest distance, that of the last query and the first key.
            least = biases.max_length - 1 + first_column - begin - before - (BLOCK - 1)
            for half in tl.static_range(2):
                place = least + half * BLOCK + lanes
                found = _sums_by_distance(sums, half * BLOCK - (BLOCK - 1), BLOCK)
                inside = (place >= 0) & (place < num_positions)
                tl.store(positions + half * num_positions + place, found, inside)
    if BUCKETS:
        bucket = tl.arange(0, BUCKETS)
        part = parts + program.to(tl.int64) * biases.num_buckets
        tl.store(part + bucket, histogram, bucket < biases.num_buckets)
