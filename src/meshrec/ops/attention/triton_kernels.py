"""Triton kernels for jagged attention: tiles of queries and keys, whose scores stay in registers.

[Note: attention tiles] A sample is cut into blocks of ``BLOCK`` tokens. A tile is a query block by a key
block. A program handles a query block for a head and sample, and loops over the key blocks that the mask
allows. For key and value gradients, it handles a key block and loops over query blocks. Every element is
written by a single program and summed in a fixed order, so equal calls give equal bits. Floats are never
added atomically: query blocks write partial bias gradients, which torch sums.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

from typing import Any, NamedTuple

import triton
import triton.language as tl

next_power_of_2 = triton.next_power_of_2

# Finite, so that exp(masked - max) is 0 and not NaN in a fully masked row.
_MASKED_SCORE = tl.constexpr(-1e30)


class AttentionTokens(NamedTuple):
    """Kernel argument: queries, keys and values, with their sizes and strides, and the factor for scores.

    ``query_stride`` is the number of elements between two tokens, and ``query_head`` between two heads. The
    fields for keys and values are named likewise.
    """

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
    """Kernel argument: the offsets and target counts for all samples, and the number of blocks per sample."""

    offsets: Any
    query_offsets: Any
    num_targets: Any
    num_blocks: Any


class AttentionBiases(NamedTuple):
    """Kernel argument: the biases. ``starts`` has the smallest time difference per bucket, in seconds."""

    position: Any
    time: Any
    timestamps: Any
    starts: Any
    max_length: Any
    num_buckets: Any


class BackwardInputs(NamedTuple):
    """Kernel argument with the inputs that only the backward pass needs, for M queries and H heads.

    ``grad`` is the output gradient. The other tensors [M, H] are read for softmax only: ``log_sums`` has the
    log-sum-exp of the scores, and ``deltas`` the dot product of output and ``grad``.
    """

    grad: Any
    log_sums: Any
    deltas: Any


@triton.jit
def load_sample(samples, number):
    """Return a sample's first token, length, length without targets, first query, and number of queries."""
    # int64, because element positions may exceed 2^31.
    first = tl.load(samples.offsets + number)
    length = (tl.load(samples.offsets + number + 1) - first).to(tl.int32)
    first_query = tl.load(samples.query_offsets + number)
    queries = (tl.load(samples.query_offsets + number + 1) - first_query).to(tl.int32)
    return first, length, length - tl.load(samples.num_targets + number).to(tl.int32), first_query, queries


@triton.jit
def _load(tokens, first, positions, stride, width, inside, WIDTH: tl.constexpr):
    """Load rows for a head at some token positions, [BLOCK, WIDTH]. Zeros where ``inside`` is false."""
    lanes = tl.arange(0, WIDTH)
    rows = tokens + (first + positions)[:, None] * stride
    return tl.load(rows + lanes[None, :], inside[:, None] & (lanes < width)[None, :], 0.0)


@triton.jit
def load_queries(tokens, head, first, positions, inside, WIDTH: tl.constexpr):
    """Load queries for a head, [BLOCK, WIDTH].

    Args:
        tokens: `AttentionTokens`.
        head: head number.
        first: first query in the sample.
        positions: query positions within the sample.
        inside: mask for valid positions.
        WIDTH: padded query width.
    """
    rows = tokens.query + head * tokens.query_head
    return _load(rows, first, positions, tokens.query_stride, tokens.query_width, inside, WIDTH)


@triton.jit
def load_grads(grad, tokens, head, first, positions, inside, WIDTH: tl.constexpr):
    """Load output gradients for a head, [BLOCK, WIDTH].

    Args:
        grad: output gradient.
        tokens, head, first, positions, inside: as for `load_queries`.
        WIDTH: padded value width.
    """
    width = tokens.value_width
    return _load(grad + head * width, first, positions, tokens.num_heads * width, width, inside, WIDTH)


@triton.jit
def load_keys(tokens, head, first, positions, inside, WIDTH: tl.constexpr):
    """Load keys for a head, [BLOCK, WIDTH].

    Args:
        tokens: `AttentionTokens`.
        head: head number.
        first: first token in the sample.
        positions: token positions within the sample.
        inside: mask for valid positions.
        WIDTH: padded query width.
    """
    rows = tokens.key + head * tokens.key_head
    return _load(rows, first, positions, tokens.key_stride, tokens.query_width, inside, WIDTH)


@triton.jit
def load_values(tokens, head, first, positions, inside, WIDTH: tl.constexpr):
    """Load values for a head, [BLOCK, WIDTH].

    Args:
        tokens, head, first, positions, inside: as for `load_keys`.
        WIDTH: padded value width.
    """
    rows = tokens.value + head * tokens.value_head
    return _load(rows, first, positions, tokens.value_stride, tokens.value_width, inside, WIDTH)


@triton.jit
def _store(target, first, positions, num_heads, head, width, inside, rows, WIDTH: tl.constexpr):
    """Store rows [BLOCK, WIDTH] for a head to a contiguous tensor [tokens, heads, width].

    Writes no row where ``inside`` is false.
    """
    lanes = tl.arange(0, WIDTH)
    # int64: first is loaded from the offsets, so the product cannot overflow.
    rows_at = target + ((first + positions)[:, None] * num_heads + head) * width
    tl.store(rows_at + lanes[None, :], rows, inside[:, None] & (lanes < width)[None, :])


@triton.jit
def query_times(biases, first, row, is_row, history):
    """Return a timestamp per query, int64 [BLOCK], from which time differences to the keys are computed.

    A history token uses the timestamp of the next token in the sample. The last history token and the targets
    use their own timestamps. Without a time bias, the result is meaningless and not used.

    Args:
        biases: `AttentionBiases`.
        first: first token in the sample.
        row: query positions within the sample.
        is_row: mask for valid rows.
        history: sample length without targets.
    """
    # A placeholder of the right type, which is not read without a time bias.
    times = row.to(tl.int64)
    if biases.time is not None:
        times = tl.load(biases.timestamps + first + tl.where(row + 1 < history, row + 1, row), is_row, 0)
    return times


@triton.jit
def _buckets(biases, apart):
    """Return the bucket for each time difference ``apart``, in seconds.

    A logarithm gives an estimate. Comparing with the bucket starts corrects it, because a rounded logarithm
    must not decide at a bucket boundary: all versions must agree there.
    """
    seconds = tl.maximum(tl.abs(apart).to(tl.float32), 1.0)
    last = biases.num_buckets - 1
    # The estimate may be off by one near a boundary.
    bucket = tl.minimum((tl.log(seconds) * (1.0 / 0.301)).to(tl.int32), last)  # BUCKET_WIDTH in naive.py
    bucket -= (tl.load(biases.starts + bucket) > seconds).to(tl.int32)
    following = tl.minimum(bucket + 1, last)
    return bucket + ((following > bucket) & (tl.load(biases.starts + following) <= seconds)).to(tl.int32)


@triton.jit
def tile_bias_and_mask(
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
    """Return the sum of the biases, the time buckets, and the mask for a tile: three [BLOCK, BLOCK] blocks.

    All heads share them. The mask is that of ``naive.attention_mask``, and also false where a query or a key
    does not exist.

    Args:
        biases: `AttentionBiases`.
        first: first token in the sample.
        length: sample length.
        history: sample length without targets.
        row: query positions within the sample.
        is_row: mask for valid rows.
        times: query timestamps.
        column: key positions within the sample.
        CAUSAL, WINDOW, CONTEXTUAL: see `Mask`.
    """
    # Positive if the key is earlier than the query.
    apart = row[:, None] - column[None, :]
    allowed = (apart >= 0) if CAUSAL else (apart == apart)
    if WINDOW > 0:
        allowed = (allowed & (tl.abs(apart) < WINDOW)) | (column < CONTEXTUAL)[None, :]
    allowed = allowed | (row < CONTEXTUAL)[:, None]
    # Only a target itself attends to a target.
    allowed = (allowed & (column < history)[None, :]) | (apart == 0)
    allowed = allowed & is_row[:, None] & (column < length)[None, :]
    bias = tl.zeros(allowed.shape, tl.float32)
    buckets = tl.zeros(allowed.shape, tl.int32)
    if biases.position is not None:
        bias += tl.load(biases.position + (biases.max_length - 1 - apart), allowed, 0.0)
    if biases.time is not None:
        key_times = tl.load(biases.timestamps + first + column, column < length, 0)
        buckets = _buckets(biases, times[:, None] - key_times[None, :])
        # Needs no mask: the bucket is in range for any two times, also for tokens that do not exist.
        bias += tl.load(biases.time + buckets)
    return bias, buckets, allowed


@triton.jit
def weights_and_score_grads(
    score, weight_grad, allowed, results, position, is_row, max_length, SOFTMAX: tl.constexpr
):
    """Return the attention weights and the gradients of the scores for a tile, both [BLOCK, BLOCK].

    Args:
        results: `BackwardInputs`; read for softmax only.
        position: index per query in the [M, H] tensors, for this head, [BLOCK].
    """
    if SOFTMAX:
        # The forward pass saved the log-sum-exp, so the weights need no second pass over the keys.
        log_sum = tl.load(results.log_sums + position, is_row, 0.0)
        weight = tl.where(allowed, tl.exp(tl.where(allowed, score - log_sum[:, None], 0.0)), 0.0)
        score_grad = weight * (weight_grad - tl.load(results.deltas + position, is_row, 0.0)[:, None])
    else:
        sigmoid = tl.sigmoid(score)
        weight = tl.where(allowed, score * sigmoid / max_length, 0.0)
        # The derivative of SiLU.
        score_grad = tl.where(allowed, sigmoid * (1 + score * (1 - sigmoid)) * weight_grad / max_length, 0.0)
    return weight, score_grad


@triton.jit
def key_blocks(
    start,
    end,
    length,
    history,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the key blocks to visit for queries in [start, end), as three ranges for `nth_block`.

    The first range has the blocks with contextual tokens, and the second range those with history. The third
    range has the blocks with targets, because a target attends to itself. The result has five block numbers
    or counts:

    - End of the first range, which starts at 0.
    - Start of the second range.
    - Number of blocks in the first two ranges together.
    - Start of the third range.
    - Number of blocks in all ranges.

    Args:
        start: first query position within the sample.
        end: end position.
        length: sample length.
        history: sample length without targets.
        CAUSAL, WINDOW, CONTEXTUAL: see `Mask`.
        BLOCK: tokens per block.
    """
    # Key positions [low, high) that the mask allows for these queries, apart from targets.
    low = 0
    high = end if CAUSAL else length
    contextual = 0
    if WINDOW > 0:
        low = tl.maximum(start - WINDOW + 1, 0)
        high = tl.minimum(high, end - 1 + WINDOW)
        # Contextual tokens are visible from outside the window, so they are a separate range.
        contextual = tl.cdiv(tl.minimum(CONTEXTUAL, history), BLOCK)
    if CONTEXTUAL > 0:
        # A block with contextual queries visits everything, since these attend to all tokens.
        low = tl.where(start < CONTEXTUAL, 0, low)
        high = tl.where(start < CONTEXTUAL, length, high)
    # No block is visited twice: a range starts where the previous range ends, or later.
    past = tl.maximum(contextual, low // BLOCK)
    past_end = tl.maximum(past, tl.cdiv(tl.minimum(high, history), BLOCK))
    targets = tl.maximum(past_end, tl.maximum(start, history) // BLOCK)
    targets_end = tl.where(end > history, tl.maximum(targets, tl.cdiv(end, BLOCK)), targets)
    num_before = contextual + past_end - past
    return contextual, past, num_before, targets, num_before + targets_end - targets


@triton.jit
def _query_blocks(
    start,
    end,
    length,
    history,
    queries,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the query blocks to visit for keys in [start, end), as two ranges for `nth_block`.

    The first range has the blocks with contextual tokens, and the second those with the other queries. The
    result has three block numbers or counts:

    - End of the first range, which starts at 0.
    - Start of the second range.
    - Number of blocks in both ranges together.
    """
    # Query positions [low, high) that see these keys.
    low = start if CAUSAL else 0
    high = length
    if WINDOW > 0:
        # All queries see contextual keys, also from outside the window.
        if not CAUSAL:
            low = tl.where(start < CONTEXTUAL, 0, tl.maximum(start - WINDOW + 1, 0))
        high = tl.where(start < CONTEXTUAL, length, tl.minimum(length, end - 1 + WINDOW))
    # Only the targets themselves attend to a block of targets.
    only_targets = start >= history
    low = tl.where(only_targets, start, low)
    high = tl.where(only_targets, end, high)
    before = length - queries  # the tokens without a query
    num_contextual = tl.minimum(tl.maximum(CONTEXTUAL - before, 0), queries)
    contextual = tl.where(only_targets, 0, tl.cdiv(num_contextual, BLOCK))
    past = tl.maximum(contextual, tl.maximum(low - before, 0) // BLOCK)
    past_end = tl.maximum(past, tl.cdiv(tl.maximum(high - before, 0), BLOCK))
    return contextual, past, contextual + past_end - past


@triton.jit
def nth_block(n, first_range, second, num_before, third):
    """Return the number of the n-th block to visit, counted through three ranges in turn.

    Args:
        n: how many blocks have been visited before.
    """
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
    """Write the attention output for a query block, and for softmax the log-sum-exp of the scores.

    Programs are numbered by sample, then by head, then by block. Late query blocks start first, because with
    a causal mask they take longest. The queries are loaded once, and kept in registers for all key blocks.

    Softmax is computed online: the loop keeps running maxima, and rescales the sums so far when a maximum
    rises. SiLU weights need no maxima, and the sum is divided by the maximum length at the end.

    Args:
        out: output [M, H, V].
        log_sums: output [M, H] for softmax.
    """
    program, num_blocks = tl.program_id(0), samples.num_blocks
    head = program // num_blocks % tokens.num_heads
    number = program // num_blocks // tokens.num_heads
    first, length, history, first_query, queries = load_sample(samples, number)
    start = (num_blocks - 1 - program % num_blocks) * BLOCK
    if start >= queries:
        return
    before = length - queries
    index = start + tl.arange(0, BLOCK)
    is_row, row = index < queries, index + before
    queries_BQ = load_queries(tokens, head, first_query, index, is_row, QUERY_WIDTH)
    times = query_times(biases, first, row, is_row, history)
    end = tl.minimum(start + BLOCK, queries)
    contextual, past, num_before, targets, num = key_blocks(
        start + before, end + before, length, history, CAUSAL, WINDOW, CONTEXTUAL, BLOCK
    )
    sums = tl.zeros([BLOCK, VALUE_WIDTH], tl.float32)
    maxima = tl.full([BLOCK], _MASKED_SCORE, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for n in range(num):
        column = nth_block(n, contextual, past, num_before, targets) * BLOCK + tl.arange(0, BLOCK)
        keys_BQ = load_keys(tokens, head, first, column, column < length, QUERY_WIDTH)
        values_BV = load_values(tokens, head, first, column, column < length, VALUE_WIDTH)
        bias, _, allowed = tile_bias_and_mask(
            biases, first, length, history, row, is_row, times, column, CAUSAL, WINDOW, CONTEXTUAL
        )
        score = tl.dot(queries_BQ, tl.trans(keys_BQ), input_precision=PRECISION) * tokens.scale + bias
        if SOFTMAX:
            score = tl.where(allowed, score, _MASKED_SCORE)
            raised = tl.maximum(maxima, tl.max(score, 1))
            # Masked again: in a row without an allowed key so far, score and maximum are equal, and exp gives
            # 1.
            weight = tl.where(allowed, tl.exp(score - raised[:, None]), 0.0)
            factor = tl.exp(maxima - raised)
            total = total * factor + tl.sum(weight, 1)
            sums = sums * factor[:, None]
            maxima = raised
        else:
            weight = tl.where(allowed, score * tl.sigmoid(score), 0.0)
        sums += tl.dot(weight, values_BV, input_precision=PRECISION)
    if SOFTMAX:
        # Rows after the last query see no key. They are not stored, but avoid 0 / 0 and log(0).
        total = tl.where(is_row, total, 1.0)
        sums = sums / total[:, None]
        tl.store(log_sums + (first_query + index) * tokens.num_heads + head, maxima + tl.log(total), is_row)
    else:
        sums = sums / biases.max_length
    _store(out, first_query, index, tokens.num_heads, head, tokens.value_width, is_row, sums, VALUE_WIDTH)


@triton.jit
def query_gradients(
    tokens,
    samples,
    biases,
    results,
    query_grad,
    SOFTMAX: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Write the query gradients for a query block.

    Args:
        query_grad: output [M, H, Q].
    """
    program, num_blocks = tl.program_id(0), samples.num_blocks
    head = program // num_blocks % tokens.num_heads
    number = program // num_blocks // tokens.num_heads
    first, length, history, first_query, queries = load_sample(samples, number)
    # Late query blocks start first, as in `attend`.
    start = (num_blocks - 1 - program % num_blocks) * BLOCK
    if start >= queries:
        return
    before = length - queries
    index = start + tl.arange(0, BLOCK)
    is_row, row = index < queries, index + before
    queries_BQ = load_queries(tokens, head, first_query, index, is_row, QUERY_WIDTH)
    grads_BV = load_grads(results.grad, tokens, head, first_query, index, is_row, VALUE_WIDTH)
    times = query_times(biases, first, row, is_row, history)
    end = tl.minimum(start + BLOCK, queries)
    contextual, past, num_before, targets, num = key_blocks(
        start + before, end + before, length, history, CAUSAL, WINDOW, CONTEXTUAL, BLOCK
    )
    sums = tl.zeros([BLOCK, QUERY_WIDTH], tl.float32)
    # Index in the [M, H] tensors.
    position = (first_query + index) * tokens.num_heads + head
    for n in range(num):
        column = nth_block(n, contextual, past, num_before, targets) * BLOCK + tl.arange(0, BLOCK)
        keys_BQ = load_keys(tokens, head, first, column, column < length, QUERY_WIDTH)
        values_BV = load_values(tokens, head, first, column, column < length, VALUE_WIDTH)
        bias, _, allowed = tile_bias_and_mask(
            biases, first, length, history, row, is_row, times, column, CAUSAL, WINDOW, CONTEXTUAL
        )
        score = tl.dot(queries_BQ, tl.trans(keys_BQ), input_precision=PRECISION) * tokens.scale + bias
        weight_grad = tl.dot(grads_BV, tl.trans(values_BV), input_precision=PRECISION)
        _, score_grad = weights_and_score_grads(
            score, weight_grad, allowed, results, position, is_row, biases.max_length, SOFTMAX
        )
        sums += tl.dot(score_grad, keys_BQ, input_precision=PRECISION)
    # As for keys: the scale applies once to the sum.
    sums *= tokens.scale
    _store(
        query_grad, first_query, index, tokens.num_heads, head, tokens.query_width, is_row, sums, QUERY_WIDTH
    )


@triton.jit
def key_gradients(
    tokens,
    samples,
    biases,
    results,
    key_grad,
    value_grad,
    SOFTMAX: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Write the key and value gradients for a key block.

    Args:
        key_grad: output [N, H, Q].
        value_grad: output [N, H, V].
    """
    program, num_blocks = tl.program_id(0), samples.num_blocks
    head = program // num_blocks % tokens.num_heads
    number = program // num_blocks // tokens.num_heads
    first, length, history, first_query, queries = load_sample(samples, number)
    # Early key blocks start first: with a causal mask, most queries see them.
    start = program % num_blocks * BLOCK
    if start >= length:
        return
    column = start + tl.arange(0, BLOCK)
    is_key = column < length
    keys_BQ = load_keys(tokens, head, first, column, is_key, QUERY_WIDTH)
    values_BV = load_values(tokens, head, first, column, is_key, VALUE_WIDTH)
    end = tl.minimum(start + BLOCK, length)
    contextual, past, num = _query_blocks(
        start, end, length, history, queries, CAUSAL, WINDOW, CONTEXTUAL, BLOCK
    )
    keys_sum = tl.zeros([BLOCK, QUERY_WIDTH], tl.float32)
    values_sum = tl.zeros([BLOCK, VALUE_WIDTH], tl.float32)
    for n in range(num):
        index = nth_block(n, contextual, past, num, 0) * BLOCK + tl.arange(0, BLOCK)
        is_row, row = index < queries, index + length - queries
        queries_BQ = load_queries(tokens, head, first_query, index, is_row, QUERY_WIDTH)
        grads_BV = load_grads(results.grad, tokens, head, first_query, index, is_row, VALUE_WIDTH)
        times = query_times(biases, first, row, is_row, history)
        bias, _, allowed = tile_bias_and_mask(
            biases, first, length, history, row, is_row, times, column, CAUSAL, WINDOW, CONTEXTUAL
        )
        score = tl.dot(queries_BQ, tl.trans(keys_BQ), input_precision=PRECISION) * tokens.scale + bias
        weight_grad = tl.dot(grads_BV, tl.trans(values_BV), input_precision=PRECISION)
        position = (first_query + index) * tokens.num_heads + head
        weight, score_grad = weights_and_score_grads(
            score, weight_grad, allowed, results, position, is_row, biases.max_length, SOFTMAX
        )
        # out = weights @ values, so values get weights^T @ grad.
        values_sum += tl.dot(tl.trans(weight), grads_BV, input_precision=PRECISION)
        keys_sum += tl.dot(tl.trans(score_grad), queries_BQ, input_precision=PRECISION)
    # score = scale * q k^T. Applied once to the sum instead of to every tile.
    keys_sum *= tokens.scale
    _store(key_grad, first, column, tokens.num_heads, head, tokens.query_width, is_key, keys_sum, QUERY_WIDTH)
    _store(
        value_grad, first, column, tokens.num_heads, head, tokens.value_width, is_key, values_sum, VALUE_WIDTH
    )
