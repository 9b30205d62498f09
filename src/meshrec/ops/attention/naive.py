"""Attention over jagged sequences in plain torch, one sample at a time: the reference for the kernels, and
the fallback without one.

Shape legend: N tokens of all samples, M queries of all samples, B samples, H heads, Q width of queries and
keys, V width of values, L max_length, P = 2 L - 1 relative positions, T time buckets; r queries and l tokens
of one sample.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops.library import implement

BUCKET_WIDTH = 0.301
"""Width of a time bucket, as a natural logarithm: a bucket begins at e^0.301 = 1.35 times the one before."""


def jagged_attention(
    query_MHQ: Tensor,
    key_NHQ: Tensor,
    value_NHV: Tensor,
    offsets_B1: Tensor,
    query_offsets_B1: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the weights times the values, where the weights of a query are, over the keys that it sees,
    ``SiLU(scores) / L`` or ``softmax(scores)``, and the scores are ``scale q k^T + bias``.

    Source: Zhai et al., "Actions speak louder than words: trillion-parameter sequential transducers for
    generative recommendations" (2024), with relative position and time bias as in its public configurations.

    Args:
        query_MHQ: queries of the last tokens of each sample; all other tokens only serve as keys.
        key_NHQ, value_NHV: the tokens of all samples.
        offsets_B1, query_offsets_B1: where tokens and queries of each sample begin, and N and M; int64.
        options: num_targets_B, position_P, time_T, timestamps_N, max_length, scale, softmax, causal, window,
            num_contextual; see `Mask` and `Bias`.

    Returns: [M, H, V], and the logarithms of the sums of exponentials [M, H] for a softmax, else [0, H].
    """
    out = value_NHV.new_empty(query_MHQ.shape[:2] + value_NHV.shape[2:])
    parts, log_sums = [], []
    for sample in _samples(query_MHQ, key_NHQ, offsets_B1, query_offsets_B1, _Options(*options)):
        values = value_NHV[sample.tokens].transpose(0, 1)
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
    """Return the gradients of queries, keys, values, position and time bias; an empty one for no bias."""
    settings = _Options(*options)
    biases = (settings.position_P, settings.time_T)
    of_position, of_time = (query_MHQ.new_zeros(0 if each is None else len(each)) for each in biases)
    of_query, of_key, of_value = (torch.zeros_like(each) for each in (query_MHQ, key_NHQ, value_NHV))
    for sample in _samples(query_MHQ, key_NHQ, offsets_B1, query_offsets_B1, settings):
        query, grad = (each[sample.queries].transpose(0, 1) for each in (query_MHQ, grad_MHV))
        key, value = (each[sample.tokens].transpose(0, 1) for each in (key_NHQ, value_NHV))
        weights, of_weights = sample.weights(), grad @ value.transpose(1, 2)
        if settings.softmax:
            of_scores = weights * (of_weights - (weights * of_weights).sum(2, keepdim=True))
        else:
            chance = sample.scores.sigmoid()
            slope = chance * (1 + sample.scores * (1 - chance)) / settings.max_length
            of_scores = (slope * of_weights).masked_fill(~sample.seen_rl, 0)
        of_value[sample.tokens] = (weights.transpose(1, 2) @ grad).transpose(0, 1)
        of_query[sample.queries] = settings.scale * (of_scores @ key).transpose(0, 1)
        of_key[sample.tokens] = settings.scale * (of_scores.transpose(1, 2) @ query).transpose(0, 1)
        of_heads = of_scores.sum(0).flatten()
        if sample.distance_rl is not None:
            of_position.index_add_(0, sample.distance_rl.flatten(), of_heads)
        if sample.bucket_rl is not None:
            of_time.index_add_(0, sample.bucket_rl.flatten(), of_heads)
    return of_query, of_key, of_value, of_position, of_time


class _Options(NamedTuple):
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
    tokens: slice
    queries: slice
    scores: Tensor
    """[H, r, l]; -inf where a softmax must not look."""
    seen_rl: Tensor
    distance_rl: Tensor | None
    bucket_rl: Tensor | None
    options: _Options

    def weights(self) -> Tensor:
        if self.options.softmax:
            return self.scores.softmax(2)
        return torch.nn.functional.silu(self.scores) * self.seen_rl / self.options.max_length


def _samples(
    query_MHQ: Tensor, key_NHQ: Tensor, offsets_B1: Tensor, query_offsets_B1: Tensor, options: _Options
) -> Iterator[_Sample]:
    """Compute the scores of every sample that has queries."""
    bounds, query_bounds = offsets_B1.tolist(), query_offsets_B1.tolist()
    for sample, num_targets in enumerate(options.num_targets_B.tolist()):
        tokens, queries = slice(*bounds[sample : sample + 2]), slice(*query_bounds[sample : sample + 2])
        length, num_queries = tokens.stop - tokens.start, queries.stop - queries.start
        if not num_queries:
            continue
        query, key = query_MHQ[queries].transpose(0, 1), key_NHQ[tokens].transpose(0, 1)
        scores = options.scale * query @ key.transpose(1, 2)
        column = torch.arange(length, device=query.device)
        row = column[length - num_queries :, None]
        distance = bucket = None
        if options.position_P is not None:
            distance = options.max_length - 1 + column - row
            scores = scores + options.position_P[distance]
        if options.time_T is not None:
            assert options.timestamps_N is not None
            times, is_followed = options.timestamps_N[tokens], row + 1 < length - num_targets
            bucket = time_buckets(times[row + is_followed.long()] - times, len(options.time_T))
            scores = scores + options.time_T[bucket]
        seen = allowed(row, column, length, num_targets, options)
        if options.softmax:
            scores = scores.masked_fill(~seen, -math.inf)
        yield _Sample(tokens, queries, scores, seen, distance, bucket, options)


def allowed(row: Tensor, column: Tensor, length: int, num_targets: int, options: _Options) -> Tensor:
    """Return whether the token at ``row`` attends to the one at ``column``, positions within a sample."""
    seen = column <= row if options.causal else column < length
    if options.window:
        seen = seen & ((row - column).abs() < options.window)
        seen = seen | (column < options.num_contextual)
    seen = seen | (row < options.num_contextual)
    return seen & (column < length - num_targets) | (row == column)


def time_buckets(seconds: Tensor, num_buckets: int) -> Tensor:
    """Return the bucket of each time difference, floor(log(max(|seconds|, 1)) / 0.301), at most T - 1."""
    begins = torch.tensor([math.exp(BUCKET_WIDTH * k) for k in range(1, num_buckets)], device=seconds.device)
    return torch.bucketize(seconds.abs().clamp(min=1).float(), begins.float(), right=True)


implement([jagged_attention, jagged_attention_grad])
