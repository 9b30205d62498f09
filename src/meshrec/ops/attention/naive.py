"""Attention over jagged sequences in plain torch, sample by sample.

The reference for the kernels, and the fallback without them. Shape legend: N tokens and M queries in all
samples, B samples, H heads, Q width of queries and keys, V width of values, L max_length, P = 2 L - 1
relative positions, T time buckets; r queries and l tokens in a sample.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.library import implement, register_fakes

BUCKET_WIDTH = 0.301
"""Width of a time bucket on a logarithmic scale: bucket k starts at e^(0.301 k) = 1.35^k seconds."""


def jagged_attention(
    query_MHQ: Tensor,
    key_NHQ: Tensor,
    value_NHV: Tensor,
    offsets_B1: Tensor,
    query_offsets_B1: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention: weights times values, with weights ``SiLU(scores) / L`` or ``softmax(scores)``.

    Scores are ``scale q k^T + bias``. Source: Zhai et al., "Actions speak louder than words:
    trillion-parameter sequential transducers for generative recommendations" (2024), with relative position
    and time bias as in the public configurations.

    Args:
        query_MHQ: queries for the last tokens in every sample. Earlier tokens have only keys and values.
        offsets_B1: first token index per sample, followed by N; int64.
        query_offsets_B1: first query index per sample, followed by M; int64.
        options: num_targets_B, position_P, time_T, timestamps_N, max_length, scale, softmax, causal, window,
            num_contextual; see `Mask` and `Bias`.

    Returns:
        The output [M, H, V], and a tensor for the backward pass. With softmax, this tensor has the
            log-sum-exp of the scores per query and head, [M, H]. With SiLU it is empty, [0, H].
    """
    # Only gives the shape and dtype of an empty result: cat needs at least one tensor.
    out = value_NHV.new_empty(query_MHQ.shape[:2] + value_NHV.shape[2:])
    parts, log_sums = [], []
    for sample in _samples(query_MHQ, key_NHQ, offsets_B1, query_offsets_B1, _Options(*options)):
        values = value_NHV[sample.tokens].transpose(0, 1)
        # Back to tokens first.
        parts.append((sample.weights() @ values).transpose(0, 1))
        log_sums.append(sample.scores.logsumexp(2).T)
    is_softmax = _Options(*options).softmax
    out = torch.cat([out[:0], *parts])
    return out, torch.cat([out[:0, :, 0], *(log_sums if is_softmax else [])])


def jagged_attention_grad(
    grad_MHV: Tensor,
    out_MHV: Tensor,
    log_sums_MH: Tensor,
    query_MHQ: Tensor,
    key_NHQ: Tensor,
    value_NHV: Tensor,
    offsets_B1: Tensor,
    query_offsets_B1: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients for queries, keys, values, position bias and time bias.

    The gradient of a bias that was not given is empty.

    Args:
        grad_MHV: gradient for the output.
        out_MHV: output of the forward pass.
        log_sums_MH: log-sum-exp from the forward pass.
        query_MHQ, key_NHQ, value_NHV, offsets_B1, query_offsets_B1, options: see ``jagged_attention``.
    """
    settings = _Options(*options)
    biases = (settings.position_P, settings.time_T)
    position_grad, time_grad = (query_MHQ.new_zeros(0 if bias is None else len(bias)) for bias in biases)
    query_grad, key_grad, value_grad = map(torch.zeros_like, (query_MHQ, key_NHQ, value_NHV))
    for sample in _samples(query_MHQ, key_NHQ, offsets_B1, query_offsets_B1, settings):
        query, grad = (tensor[sample.queries].transpose(0, 1) for tensor in (query_MHQ, grad_MHV))
        key, value = (tensor[sample.tokens].transpose(0, 1) for tensor in (key_NHQ, value_NHV))
        weights, weight_grads = sample.weights(), grad @ value.transpose(1, 2)
        if settings.softmax:
            # The softmax derivative: a row's weights sum to 1, so their gradients are centered.
            score_grads = weights * (weight_grads - (weights * weight_grads).sum(2, keepdim=True))
        else:
            sigmoid = sample.scores.sigmoid()
            # The derivative of SiLU, divided by L like the weights.
            slope = sigmoid * (1 + sample.scores * (1 - sigmoid)) / settings.max_length
            score_grads = (slope * weight_grads).masked_fill(~sample.seen_rl, 0)
        value_grad[sample.tokens] = (weights.transpose(1, 2) @ grad).transpose(0, 1)
        query_grad[sample.queries] = settings.scale * (score_grads @ key).transpose(0, 1)
        key_grad[sample.tokens] = settings.scale * (score_grads.transpose(1, 2) @ query).transpose(0, 1)
        # All heads share the biases.
        grad_sum = score_grads.sum(0).flatten()
        if sample.distance_rl is not None:
            position_grad.index_add_(0, sample.distance_rl.flatten(), grad_sum)
        if sample.bucket_rl is not None:
            time_grad.index_add_(0, sample.bucket_rl.flatten(), grad_sum)
    return query_grad, key_grad, value_grad, position_grad, time_grad


class _Options(NamedTuple):
    """The operator arguments after the offsets, in schema order; see ``jagged_attention``."""

    num_targets_B: Tensor
    position_P: Tensor | None
    time_T: Tensor | None
    timestamps_N: Tensor | None
    max_length: int
    scale: float
    softmax: bool
    causal: bool
    window: int
    num_contextual: int


class _Sample(NamedTuple):
    """Attention scores for a single sample, and inputs for the backward pass."""

    tokens: slice
    """The sample's rows in keys and values."""
    queries: slice
    """The sample's rows in queries."""
    scores: Tensor
    """Scores [H, r, l]; for softmax, -inf at masked positions."""
    seen_rl: Tensor
    """Attention mask: whether the query attends to the key, bool."""
    distance_rl: Tensor | None
    """Index into the position bias; None: no such bias."""
    bucket_rl: Tensor | None
    """Index into the time bias; None: no such bias."""
    options: _Options

    def weights(self) -> Tensor:
        """Return the attention weights [H, r, l] for the sample's r queries and l tokens, 0 where masked."""
        if self.options.softmax:
            return self.scores.softmax(2)
        return torch.nn.functional.silu(self.scores) * self.seen_rl / self.options.max_length


def _samples(
    query_MHQ: Tensor, key_NHQ: Tensor, offsets_B1: Tensor, query_offsets_B1: Tensor, options: _Options
) -> Iterator[_Sample]:
    """Yield the attention scores sample by sample. Samples without queries are skipped."""
    bounds, query_bounds = offsets_B1.tolist(), query_offsets_B1.tolist()
    for sample, num_targets in enumerate(options.num_targets_B.tolist()):
        tokens, queries = slice(*bounds[sample : sample + 2]), slice(*query_bounds[sample : sample + 2])
        length, num_queries = tokens.stop - tokens.start, queries.stop - queries.start
        if not num_queries:
            continue
        # Heads first, so that matrix products are per head.
        query, key = query_MHQ[queries].transpose(0, 1), key_NHQ[tokens].transpose(0, 1)
        scores = options.scale * query @ key.transpose(1, 2)
        column = torch.arange(length, device=query.device)
        # The queries belong to the last tokens.
        row = column[length - num_queries :, None]
        distance = bucket = None
        if options.position_P is not None:
            # 0 to 2 L - 2, because positions differ by less than L.
            distance = options.max_length - 1 + column - row
            scores = scores + options.position_P[distance]
        if options.time_T is not None:
            assert options.timestamps_N is not None
            # A history token uses the time of its successor; the last one and the targets have none.
            times, is_followed = options.timestamps_N[tokens], row + 1 < length - num_targets
            bucket = time_buckets(times[row + is_followed.long()] - times, len(options.time_T))
            scores = scores + options.time_T[bucket]
        seen = attention_mask(row, column, length, num_targets, options)
        if options.softmax:
            scores = scores.masked_fill(~seen, -math.inf)
        yield _Sample(tokens, queries, scores, seen, distance, bucket, options)


def attention_mask(row: Tensor, column: Tensor, length: int, num_targets: int, options: _Options) -> Tensor:
    """Return whether the token at position ``row`` attends to the token at position ``column``: bool [r, l].

    r and l are the numbers of queries and tokens in the sample.

    Args:
        row: query positions in the sample, int64, broadcast against ``column``.
        column: key positions in the sample, int64.
    """
    seen = column <= row if options.causal else column < length
    if options.window:
        seen = seen & ((row - column).abs() < options.window)
        seen = seen | (column < options.num_contextual)
    # Contextual tokens attend to all tokens, even later ones and those outside the window.
    seen = seen | (row < options.num_contextual)
    # Targets come last. Only the target itself attends to it.
    return seen & (column < length - num_targets) | (row == column)


def time_buckets(seconds: Tensor, num_buckets: int) -> Tensor:
    """Return the bucket for each time difference: floor(log(max(|seconds|, 1)) / 0.301), at most T - 1.

    Args:
        seconds: time differences, any integer or float dtype.
        num_buckets: T.
    """
    starts = torch.tensor([math.exp(BUCKET_WIDTH * k) for k in range(1, num_buckets)], device=seconds.device)
    # Compare with bucket starts instead of rounding a logarithm, so that all backends agree at bucket
    # boundaries.
    return torch.bucketize(seconds.abs().clamp(min=1).float(), starts.float(), right=True)


implement([jagged_attention, jagged_attention_grad])


# Shapes for tracing, and the gradient, shared by all kernels.

_NUM_TENSORS = 9  # query, key, value, offsets, query_offsets, num_targets, position, time, timestamps


def _fake(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return the result shapes of ``jagged_attention``, for tracing."""
    is_softmax = options[8]
    num_queries, num_heads, _ = query.shape
    out = value.new_empty(num_queries, num_heads, value.shape[2])
    return out, query.new_empty(num_queries if is_softmax else 0, num_heads)


def _fake_grad(
    grad: Tensor, out: Tensor, log_sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    """Return the result shapes of ``jagged_attention_grad``, for tracing."""
    biases = [query.new_empty(0 if bias is None else len(bias)) for bias in options[3:5]]
    return (*(tensor.new_empty(tensor.shape) for tensor in (query, key, value)), *biases)


register_fakes(jagged_attention=_fake, jagged_attention_grad=_fake_grad)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the inputs and the output of ``jagged_attention`` for the backward pass."""
    ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])
    ctx.options = inputs[_NUM_TENSORS:]
    # The log-sum output only serves the backward pass.
    ctx.mark_non_differentiable(output[1])
    # The log-sum output gets no gradient. Do not allocate zeros for it.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return a gradient per argument of ``jagged_attention``; None for arguments that have no gradient."""
    num_inputs = _NUM_TENSORS + len(ctx.options)
    if grad is None:
        return (None,) * num_inputs
    saved = ctx.saved_tensors
    *token_grads, position_grad, time_grad = operators.jagged_attention_grad(grad, *saved, *ctx.options)
    # Saved tensors end with position, time, timestamps.
    position, time = saved[-3:-1]
    bias_grads = (None if position is None else position_grad, None if time is None else time_grad)
    # No gradient for offsets, query offsets, target counts, timestamps and options.
    return (*token_grads, None, None, None, *bias_grads, *(None,) * (num_inputs - 8))


torch.library.register_autograd("meshrec::jagged_attention", _backward, setup_context=_context)
