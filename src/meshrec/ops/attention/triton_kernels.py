"""The kernels of ``triton.py``: tiles of queries and keys whose scores stay in registers.

[Note: tiles of attention on GPUs] A program has one block of queries (or, for the gradients of keys and
values, of keys) of one head of one sample, and meets the blocks of the other side that the mask allows. Every
number is written by one program and summed in one order, so equal calls give equal bits. No float is added
atomically: each block of queries writes its part of the gradients of the biases, and torch adds the parts.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

from typing import Any, NamedTuple

import triton
import triton.language as tl

next_power_of_2 = triton.next_power_of_2

_NEVER = tl.constexpr(-1e30)  # the score of a key that a softmax must not see


class AttentionTokens(NamedTuple):
    """Queries, keys and values, their strides between tokens and heads, and their sizes."""

    query: Any
    key: Any
    value: Any
    query_stride: Any
    query_head: Any
    key_stride: Any
    key_head: Any
    value_stride: Any
    value_head: Any
    num_heads: Any
    query_width: Any
    value_width: Any
    scale: Any


class AttentionSamples(NamedTuple):
    """The places where samples begin, and the most blocks that one of them can have."""

    offsets: Any
    query_offsets: Any
    num_targets: Any
    num_blocks: Any


class AttentionBiases(NamedTuple):
    """The biases; ``begins`` has the smallest time difference of each bucket."""

    position: Any
    time: Any
    timestamps: Any
    begins: Any
    max_length: Any
    num_buckets: Any


class AttentionResults(NamedTuple):
    """The gradient of the result, and what a softmax needs beside it: the logarithms of sums [M, H], and the
    products of each result with its gradient [M, H].
    """

    grad: Any
    log_sums: Any
    deltas: Any


@triton.jit
def sample_of(samples, number):
    """Return a sample's first token, length, length without targets, first query, and number of queries."""
    first = tl.load(samples.offsets + number)
    length = (tl.load(samples.offsets + number + 1) - first).to(tl.int32)
    first_query = tl.load(samples.query_offsets + number)
    queries = (tl.load(samples.query_offsets + number + 1) - first_query).to(tl.int32)
    return first, length, length - tl.load(samples.num_targets + number).to(tl.int32), first_query, queries


@triton.jit
def _load(tokens, first, places, stride, width, inside, WIDTH: tl.constexpr):
    """Load rows of a head, [BLOCK, WIDTH], with zeros outside."""
    lanes = tl.arange(0, WIDTH)
    rows = tokens + (first + places)[:, None] * stride
    return tl.load(rows + lanes[None, :], inside[:, None] & (lanes < width)[None, :], 0.0)


@triton.jit
def load_queries(tokens, head, first, places, inside, WIDTH: tl.constexpr):
    rows = tokens.query + head * tokens.query_head
    return _load(rows, first, places, tokens.query_stride, tokens.query_width, inside, WIDTH)


@triton.jit
def load_grads(grad, tokens, head, first, places, inside, WIDTH: tl.constexpr):
    width = tokens.value_width
    return _load(grad + head * width, first, places, tokens.num_heads * width, width, inside, WIDTH)


@triton.jit
def load_keys(tokens, head, first, places, inside, WIDTH: tl.constexpr):
    rows = tokens.key + head * tokens.key_head
    return _load(rows, first, places, tokens.key_stride, tokens.query_width, inside, WIDTH)


@triton.jit
def load_values(tokens, head, first, places, inside, WIDTH: tl.constexpr):
    rows = tokens.value + head * tokens.value_head
    return _load(rows, first, places, tokens.value_stride, tokens.value_width, inside, WIDTH)


@triton.jit
def _store(target, first, places, num_heads, head, width, inside, rows, WIDTH: tl.constexpr):
    """Store rows of a head in a tensor [tokens, heads, width] without gaps."""
    lanes = tl.arange(0, WIDTH)
    at = target + ((first + places)[:, None] * num_heads + head) * width
    tl.store(at + lanes[None, :], rows, inside[:, None] & (lanes < width)[None, :])


@triton.jit
def times_of_queries(biases, first, row, is_row, history):
    """Return the time of the next token of the history; the last one and targets have their own."""
    times = row.to(tl.int64)
    if biases.time is not None:
        times = tl.load(biases.timestamps + first + tl.where(row + 1 < history, row + 1, row), is_row, 0)
    return times


@triton.jit
def _buckets(biases, apart):
    """Return the buckets of time differences: an estimate, or the bucket beside it where that one holds."""
    seconds = tl.maximum(tl.abs(apart).to(tl.float32), 1.0)
    last = biases.num_buckets - 1
    found = tl.minimum((tl.log(seconds) * (1.0 / 0.301)).to(tl.int32), last)  # BUCKET_WIDTH in naive.py
    found -= (tl.load(biases.begins + found) > seconds).to(tl.int32)
    following = tl.minimum(found + 1, last)
    return found + ((following > found) & (tl.load(biases.begins + following) <= seconds)).to(tl.int32)


@triton.jit
def pairs(
    biases,
    first,
    length,
    history,
    row,
    is_row,
    times,
    column,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr,
):
    """Return what a tile's heads share: its bias, its buckets, and which pairs are allowed, as
    ``naive.allowed`` has it.
    """
    apart = row[:, None] - column[None, :]
    seen = (apart >= 0) if CAUSAL else (apart == apart)
    if WINDOW > 0:
        seen = (seen & (tl.abs(apart) < WINDOW)) | (column < CONTEXTUAL)[None, :]
    seen = seen | (row < CONTEXTUAL)[:, None]
    seen = (seen & (column < history)[None, :]) | (apart == 0)
    seen = seen & is_row[:, None] & (column < length)[None, :]
    bias = tl.zeros(seen.shape, tl.float32)
    buckets = tl.zeros(seen.shape, tl.int32)
    if biases.position is not None:
        bias += tl.load(biases.position + (biases.max_length - 1 - apart), seen, 0.0)
    if biases.time is not None:
        own = tl.load(biases.timestamps + first + column, column < length, 0)
        buckets = _buckets(biases, times[:, None] - own[None, :])
        bias += tl.load(biases.time + buckets)
    return bias, buckets, seen


@triton.jit
def of_scores(score, of_weight, seen, results, at, is_row, max_length, SOFTMAX: tl.constexpr):
    """Return the weights of a tile, and the gradient of its scores from that of its weights."""
    if SOFTMAX:
        log_sum = tl.load(results.log_sums + at, is_row, 0.0)
        weight = tl.where(seen, tl.exp(tl.where(seen, score - log_sum[:, None], 0.0)), 0.0)
        of_score = weight * (of_weight - tl.load(results.deltas + at, is_row, 0.0)[:, None])
    else:
        chance = tl.sigmoid(score)
        weight = tl.where(seen, score * chance / max_length, 0.0)
        of_score = tl.where(seen, chance * (1 + score * (1 - chance)) * of_weight / max_length, 0.0)
    return weight, of_score


@triton.jit
def key_blocks(
    begin,
    end,
    length,
    history,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the blocks of keys that queries at [begin, end) meet, as `nth` takes them: those of contextual
    tokens, of the history, and of targets, which meet themselves. The last number is how many there are.
    """
    low = 0
    high = end if CAUSAL else length
    contextual = 0
    if WINDOW > 0:
        low = tl.maximum(begin - WINDOW + 1, 0)
        high = tl.minimum(high, end - 1 + WINDOW)
        contextual = tl.cdiv(tl.minimum(CONTEXTUAL, history), BLOCK)
    if CONTEXTUAL > 0:
        low = tl.where(begin < CONTEXTUAL, 0, low)
        high = tl.where(begin < CONTEXTUAL, length, high)
    past = tl.maximum(contextual, low // BLOCK)
    past_end = tl.maximum(past, tl.cdiv(tl.minimum(high, history), BLOCK))
    own = tl.maximum(past_end, tl.maximum(begin, history) // BLOCK)
    own_end = tl.where(end > history, tl.maximum(own, tl.cdiv(end, BLOCK)), own)
    num_before = contextual + past_end - past
    return contextual, past, num_before, own, num_before + own_end - own


@triton.jit
def _query_blocks(
    begin,
    end,
    length,
    history,
    queries,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the blocks of queries that meet keys at [begin, end): those of contextual tokens, and others.
    The last number is how many there are.
    """
    low = begin if CAUSAL else 0
    high = length
    if WINDOW > 0:
        if not CAUSAL:
            low = tl.where(begin < CONTEXTUAL, 0, tl.maximum(begin - WINDOW + 1, 0))
        high = tl.where(begin < CONTEXTUAL, length, tl.minimum(length, end - 1 + WINDOW))
    only_targets = begin >= history
    low = tl.where(only_targets, begin, low)
    high = tl.where(only_targets, end, high)
    before = length - queries  # the tokens without a query
    num_contextual = tl.minimum(tl.maximum(CONTEXTUAL - before, 0), queries)
    contextual = tl.where(only_targets, 0, tl.cdiv(num_contextual, BLOCK))
    past = tl.maximum(contextual, tl.maximum(low - before, 0) // BLOCK)
    past_end = tl.maximum(past, tl.cdiv(tl.maximum(high - before, 0), BLOCK))
    return contextual, past, contextual + past_end - past


@triton.jit
def nth(n, first_range, second, num_before, third):
    """Return the n-th block of three ranges."""
    return tl.where(
        n < first_range, n, tl.where(n < num_before, second + n - first_range, third + n - num_before)
    )


@triton.jit
def attend(
    tokens,
    samples,
    biases,
    out,
    log_sums,
    SOFTMAX: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Write the results of a block of queries, and for a softmax the logarithms of their sums."""
    program, num_blocks = tl.program_id(0), samples.num_blocks
    head = program // num_blocks % tokens.num_heads
    number = program // num_blocks // tokens.num_heads
    first, length, history, first_query, queries = sample_of(samples, number)
    begin = (num_blocks - 1 - program % num_blocks) * BLOCK  # a causal mask lets late queries meet most keys
    if begin >= queries:
        return
    before = length - queries
    index = begin + tl.arange(0, BLOCK)
    is_row, row = index < queries, index + before
    queries_BQ = load_queries(tokens, head, first_query, index, is_row, QUERY_WIDTH)
    times = times_of_queries(biases, first, row, is_row, history)
    end = tl.minimum(begin + BLOCK, queries)
    contextual, past, num_before, own, num = key_blocks(
        begin + before, end + before, length, history, CAUSAL, WINDOW, CONTEXTUAL, BLOCK
    )
    sums = tl.zeros([BLOCK, VALUE_WIDTH], tl.float32)
    most = tl.full([BLOCK], _NEVER, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for n in range(num):
        column = nth(n, contextual, past, num_before, own) * BLOCK + tl.arange(0, BLOCK)
        keys_BQ = load_keys(tokens, head, first, column, column < length, QUERY_WIDTH)
        values_BV = load_values(tokens, head, first, column, column < length, VALUE_WIDTH)
        bias, _, seen = pairs(
            biases, first, length, history, row, is_row, times, column, CAUSAL, WINDOW, CONTEXTUAL
        )
        score = tl.dot(queries_BQ, tl.trans(keys_BQ), input_precision=PRECISION) * tokens.scale + bias
        if SOFTMAX:
            score = tl.where(seen, score, _NEVER)
            top = tl.maximum(most, tl.max(score, 1))
            weight = tl.where(seen, tl.exp(score - top[:, None]), 0.0)
            factor = tl.exp(most - top)
            total = total * factor + tl.sum(weight, 1)
            sums = sums * factor[:, None]
            most = top
        else:
            weight = tl.where(seen, score * tl.sigmoid(score), 0.0)
        sums += tl.dot(weight, values_BV, input_precision=PRECISION)
    if SOFTMAX:
        total = tl.where(is_row, total, 1.0)
        sums = sums / total[:, None]
        tl.store(log_sums + (first_query + index) * tokens.num_heads + head, most + tl.log(total), is_row)
    else:
        sums = sums / biases.max_length
    _store(out, first_query, index, tokens.num_heads, head, tokens.value_width, is_row, sums, VALUE_WIDTH)


@triton.jit
def of_queries(
    tokens,
    samples,
    biases,
    results,
    of_query,
    SOFTMAX: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Write the gradients of a block of queries."""
    program, num_blocks = tl.program_id(0), samples.num_blocks
    head = program // num_blocks % tokens.num_heads
    number = program // num_blocks // tokens.num_heads
    first, length, history, first_query, queries = sample_of(samples, number)
    begin = (num_blocks - 1 - program % num_blocks) * BLOCK
    if begin >= queries:
        return
    before = length - queries
    index = begin + tl.arange(0, BLOCK)
    is_row, row = index < queries, index + before
    queries_BQ = load_queries(tokens, head, first_query, index, is_row, QUERY_WIDTH)
    grads_BV = load_grads(results.grad, tokens, head, first_query, index, is_row, VALUE_WIDTH)
    times = times_of_queries(biases, first, row, is_row, history)
    end = tl.minimum(begin + BLOCK, queries)
    contextual, past, num_before, own, num = key_blocks(
        begin + before, end + before, length, history, CAUSAL, WINDOW, CONTEXTUAL, BLOCK
    )
    sums = tl.zeros([BLOCK, QUERY_WIDTH], tl.float32)
    at = (first_query + index) * tokens.num_heads + head
    for n in range(num):
        column = nth(n, contextual, past, num_before, own) * BLOCK + tl.arange(0, BLOCK)
        keys_BQ = load_keys(tokens, head, first, column, column < length, QUERY_WIDTH)
        values_BV = load_values(tokens, head, first, column, column < length, VALUE_WIDTH)
        bias, _, seen = pairs(
            biases, first, length, history, row, is_row, times, column, CAUSAL, WINDOW, CONTEXTUAL
        )
        score = tl.dot(queries_BQ, tl.trans(keys_BQ), input_precision=PRECISION) * tokens.scale + bias
        of_weight = tl.dot(grads_BV, tl.trans(values_BV), input_precision=PRECISION)
        _, of_score = of_scores(score, of_weight, seen, results, at, is_row, biases.max_length, SOFTMAX)
        sums += tl.dot(of_score, keys_BQ, input_precision=PRECISION)
    sums *= tokens.scale
    _store(
        of_query, first_query, index, tokens.num_heads, head, tokens.query_width, is_row, sums, QUERY_WIDTH
    )


@triton.jit
def of_keys(
    tokens,
    samples,
    biases,
    results,
    of_key,
    of_value,
    SOFTMAX: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Write the gradients of a block of keys and values."""
    program, num_blocks = tl.program_id(0), samples.num_blocks
    head = program // num_blocks % tokens.num_heads
    number = program // num_blocks // tokens.num_heads
    first, length, history, first_query, queries = sample_of(samples, number)
    begin = program % num_blocks * BLOCK
    if begin >= length:
        return
    column = begin + tl.arange(0, BLOCK)
    is_key = column < length
    keys_BQ = load_keys(tokens, head, first, column, is_key, QUERY_WIDTH)
    values_BV = load_values(tokens, head, first, column, is_key, VALUE_WIDTH)
    end = tl.minimum(begin + BLOCK, length)
    contextual, past, num = _query_blocks(
        begin, end, length, history, queries, CAUSAL, WINDOW, CONTEXTUAL, BLOCK
    )
    keys_sum = tl.zeros([BLOCK, QUERY_WIDTH], tl.float32)
    values_sum = tl.zeros([BLOCK, VALUE_WIDTH], tl.float32)
    for n in range(num):
        index = nth(n, contextual, past, num, 0) * BLOCK + tl.arange(0, BLOCK)
        is_row, row = index < queries, index + length - queries
        queries_BQ = load_queries(tokens, head, first_query, index, is_row, QUERY_WIDTH)
        grads_BV = load_grads(results.grad, tokens, head, first_query, index, is_row, VALUE_WIDTH)
        times = times_of_queries(biases, first, row, is_row, history)
        bias, _, seen = pairs(
            biases, first, length, history, row, is_row, times, column, CAUSAL, WINDOW, CONTEXTUAL
        )
        score = tl.dot(queries_BQ, tl.trans(keys_BQ), input_precision=PRECISION) * tokens.scale + bias
        of_weight = tl.dot(grads_BV, tl.trans(values_BV), input_precision=PRECISION)
        at = (first_query + index) * tokens.num_heads + head
        weight, of_score = of_scores(score, of_weight, seen, results, at, is_row, biases.max_length, SOFTMAX)
        values_sum += tl.dot(tl.trans(weight), grads_BV, input_precision=PRECISION)
        keys_sum += tl.dot(tl.trans(of_score), queries_BQ, input_precision=PRECISION)
    keys_sum *= tokens.scale
    _store(of_key, first, column, tokens.num_heads, head, tokens.query_width, is_key, keys_sum, QUERY_WIDTH)
    _store(
        of_value, first, column, tokens.num_heads, head, tokens.value_width, is_key, values_sum, VALUE_WIDTH
    )
