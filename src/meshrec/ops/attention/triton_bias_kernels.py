"""Triton kernel for attention bias gradients; see [Note: attention tiles] in ``triton_kernels.py``."""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

import triton
import triton.language as tl

from meshrec.ops.attention.triton_kernels import (
    key_blocks,
    load_grads,
    load_keys,
    load_queries,
    load_sample,
    load_values,
    nth_block,
    query_times,
    tile_bias_and_mask,
    weights_and_score_grads,
)


@triton.jit
def _sums_by_distance(tile, min_distance, BLOCK: tl.constexpr):
    """Sum the tile elements that have equal distances (key position minus query position).

    Returns [BLOCK]: the sums for the distances ``min_distance`` to ``min_distance + BLOCK - 1``.
    """
    # Shift every tile row so that equal distances share a column, then sum the columns.
    key = tl.arange(0, BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :] + min_distance
    inside = (key >= 0) & (key < BLOCK)
    return tl.sum(tl.where(inside, tl.gather(tile, tl.where(inside, key, 0), 1), 0.0), 0)


@triton.jit
def _add_to_histogram(histogram, tile, buckets, allowed, num_buckets, BUCKETS: tl.constexpr):
    """Return a histogram over time buckets, [BUCKETS], to which every tile element is added in its bucket.

    Args:
        histogram: sums before, fp32 [BUCKETS].
        tile: values to add, fp32 [BLOCK, BLOCK]; 0 where ``allowed`` is false.
    """
    # Times within a tile are close together, so few buckets occur: loop over these only.
    low = tl.min(tl.min(tl.where(allowed, buckets, num_buckets), 1), 0)
    high = tl.max(tl.max(tl.where(allowed, buckets, -1), 1), 0)
    for bucket in range(low, high + 1):
        total = tl.sum(tl.sum(tl.where(buckets == bucket, tile, 0.0), 1), 0)
        histogram += tl.where(tl.arange(0, BUCKETS) == bucket, total, 0.0)
    return histogram


@triton.jit
def _sum_over_heads(
    tokens,
    results,
    rows,
    keys,
    shared_state,
    SOFTMAX: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Return the score gradients for a tile, summed over all heads: [BLOCK, BLOCK].

    Args:
        rows: the queries of the tile: first query of the sample, positions within the sample's queries, mask.
        keys: the keys of the tile: first token of the sample, positions within the sample, mask.
        shared_state: values equal for all heads: bias and attention mask of the tile, ``max_length``.
    """
    first_query, index, is_row = rows
    first, column, is_key = keys
    # Bias and mask are equal for all heads.
    bias, allowed, max_length = shared_state
    sums = tl.zeros([BLOCK, BLOCK], tl.float32)
    for head in range(tokens.num_heads):
        queries_BQ = load_queries(tokens, head, first_query, index, is_row, QUERY_WIDTH)
        grads_BV = load_grads(results.grad, tokens, head, first_query, index, is_row, VALUE_WIDTH)
        keys_BQ = load_keys(tokens, head, first, column, is_key, QUERY_WIDTH)
        values_BV = load_values(tokens, head, first, column, is_key, VALUE_WIDTH)
        score = tl.dot(queries_BQ, tl.trans(keys_BQ), input_precision=PRECISION) * tokens.scale + bias
        weight_grad = tl.dot(grads_BV, tl.trans(values_BV), input_precision=PRECISION)
        position = (first_query + index) * tokens.num_heads + head
        _, score_grad = weights_and_score_grads(
            score, weight_grad, allowed, results, position, is_row, max_length, SOFTMAX
        )
        sums += score_grad
    return sums


@triton.jit
def bias_gradients(
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
    """Write a query block's contribution to a bias gradient, summed over heads.

    If BUCKETS is 0, the bias is the position bias, and otherwise the time bias. A launch handles a single
    bias, because Triton does not finish compiling a kernel for both. Every program writes to a separate part
    of ``parts``, and the caller adds the parts.

    For the position bias, a part has two rows with an element per distance (key position minus query
    position). A tile (the query block by a key block) writes the sums for the lower half of its distances to
    the first row, and those for the upper half to the second row. A single row would not do: the upper half
    overlaps with the lower half of the next tile, which would overwrite the sums.

    Args:
        parts: output, initially 0. A program's part is [num_buckets] for the time bias, and
            [2, 2 max_length - 1] for the position bias.
        BUCKETS: number of time buckets, padded to a power of two; 0: position bias.
    """
    program, num_blocks = tl.program_id(0), samples.num_blocks
    first, length, history, first_query, queries = load_sample(samples, first_sample + program // num_blocks)
    start = program % num_blocks * BLOCK
    if start >= queries:
        return
    lanes, before = tl.arange(0, BLOCK), length - queries
    index = start + lanes
    is_row, row = index < queries, index + before
    rows = first_query, index, is_row
    times = query_times(biases, first, row, is_row, history)
    end = tl.minimum(start + BLOCK, queries)
    contextual, past, num_before, targets, num = key_blocks(
        start + before, end + before, length, history, CAUSAL, WINDOW, CONTEXTUAL, BLOCK
    )
    if BUCKETS:
        histogram = tl.zeros([BUCKETS], tl.float32)
    else:
        num_positions = 2 * biases.max_length - 1
        positions = parts + 2 * program.to(tl.int64) * num_positions
    for n in range(num):
        first_column = nth_block(n, contextual, past, num_before, targets) * BLOCK
        column = first_column + lanes
        bias, buckets, allowed = tile_bias_and_mask(
            biases, first, length, history, row, is_row, times, column, CAUSAL, WINDOW, CONTEXTUAL
        )
        keys, shared_state = (first, column, column < length), (bias, allowed, biases.max_length)
        sums = _sum_over_heads(
            tokens, results, rows, keys, shared_state, SOFTMAX, PRECISION, BLOCK, QUERY_WIDTH, VALUE_WIDTH
        )
        if BUCKETS:
            histogram = _add_to_histogram(histogram, sums, buckets, allowed, biases.num_buckets, BUCKETS)
        else:
            # The smallest distance in the tile: last query and first key.
            min_distance = biases.max_length - 1 + first_column - start - before - (BLOCK - 1)
            for half in tl.static_range(2):
                distance = min_distance + half * BLOCK + lanes
                totals = _sums_by_distance(sums, half * BLOCK - (BLOCK - 1), BLOCK)
                inside = (distance >= 0) & (distance < num_positions)
                tl.store(positions + half * num_positions + distance, totals, inside)
    if BUCKETS:
        bucket = tl.arange(0, BUCKETS)
        part = parts + program.to(tl.int64) * biases.num_buckets
        tl.store(part + bucket, histogram, bucket < biases.num_buckets)
