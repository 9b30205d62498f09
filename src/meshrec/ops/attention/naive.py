"""Attention over jagged sequences in plain torch, one sample at a time: the reference for `blocks.py`.

Shape legend: N tokens of all samples, B samples, L tokens of one sample, H heads, Q width of queries and
keys, V width of values, P = 2 max_length - 1 relative positions, T time buckets.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

BUCKET_WIDTH = 0.301
"""Width of a time bucket, as a natural logarithm: a bucket begins at e^0.301 = 1.35 times the one before."""


class Mask(NamedTuple):
    """Which tokens of a sample a token attends to.

    A sample is some contextual tokens, then a history in order of time, then the targets that are to be
    scored. A target attends to itself, the contextual tokens and the history, and no other token attends to a
    target, so that a target's result does not depend on the other targets.
    """

    causal: bool = True
    """Whether a token of the history attends to itself and earlier tokens only."""
    window: int = 0
    """A token attends to tokens less than ``window`` positions away and to contextual ones; 0: to all."""
    num_contextual: int = 0
    """Number of contextual tokens, which begin every sample. They attend to everything but targets."""


class Bias(NamedTuple):
    """What is added to the scaled dot products, the same for all heads. None: nothing."""

    position_P: Tensor | None = None
    """Learned, fp32 [2 max_length - 1]; token i attends to token j with entry max_length - 1 + j - i."""
    time_T: Tensor | None = None
    """Learned, fp32 [T], by the bucket of the time between a token and the token after the one that attends
    to it, whose time is known when the next item is asked for. The last token of a sample takes its own
    time."""
    timestamps_N: Tensor | None = None
    """Times of the tokens in seconds, int64; needed with ``time_T``."""


_CAUSAL, _NO_BIAS = Mask(), Bias()


def silu_attention(
    query_NHQ: Tensor,
    key_NHQ: Tensor,
    value_NHV: Tensor,
    offsets_B1: Tensor,
    *,
    max_length: int,
    scale: float = 1.0,
    mask: Mask = _CAUSAL,
    bias: Bias = _NO_BIAS,
    num_targets_B: Tensor | None = None,
) -> Tensor:
    """Return ``SiLU(scale q k^T + bias) / max_length`` times the values that the mask allows.

    Source: Zhai et al., "Actions speak louder than words: trillion-parameter sequential transducers for
    generative recommendations" (2024), with relative position and time bias as in its public configurations.

    Args:
        query_NHQ, key_NHQ, value_NHV: the tokens of all samples.
        offsets_B1: where each sample begins, and N; int64 [B + 1].
        max_length: the divisor, and the largest length of a sample.
        scale: the factor of the dot products.
        num_targets_B: the number of targets at the end of each sample, int64 [B]; None: no targets.

    Returns: [N, H, V].
    """
    bounds = offsets_B1.tolist()
    targets = [0] * (len(bounds) - 1) if num_targets_B is None else num_targets_B.tolist()
    out = []
    for first, end, num_targets in zip(bounds, bounds[1:], targets, strict=False):
        query, key, value = (each[first:end].transpose(0, 1) for each in (query_NHQ, key_NHQ, value_NHV))
        scores = scale * query @ key.transpose(1, 2)
        positions = torch.arange(end - first, device=query.device)
        if bias.position_P is not None:
            scores = scores + bias.position_P[max_length - 1 + positions - positions[:, None]]
        if bias.time_T is not None:
            assert bias.timestamps_N is not None
            times = bias.timestamps_N[first:end]
            following = torch.cat([times[1:], times[-1:]])
            scores = scores + bias.time_T[time_buckets(following[:, None] - times, len(bias.time_T))]
        seen = allowed(positions[:, None], positions, end - first, num_targets, mask)
        weights = torch.nn.functional.silu(scores) * seen / max_length
        out.append((weights @ value).transpose(0, 1))
    return torch.cat(out) if out else value_NHV[:0]


def allowed(
    row: Tensor, column: Tensor, length: int | Tensor, num_targets: int | Tensor, mask: Mask
) -> Tensor:
    """Return whether the token at ``row`` attends to the one at ``column``; all arguments broadcast.

    Args:
        row, column: positions within a sample.
        length: number of tokens of the sample, its targets included.
        num_targets: number of targets at its end.
    """
    history_end = length - num_targets
    seen = column <= row if mask.causal else column < length
    if mask.window:
        seen = seen & ((row - column).abs() < mask.window) | (column < mask.num_contextual) & (column <= row)
    seen = seen | (row < mask.num_contextual)
    return seen & (column < history_end) & (row < length) | (row == column) & (row < length)


def time_buckets(seconds: Tensor, num_buckets: int) -> Tensor:
    """Return the bucket of each time difference, floor(log(max(|seconds|, 1)) / 0.301), at most T - 1."""
    bucket = (seconds.abs().clamp(min=1).float().log() / BUCKET_WIDTH).long()
    return bucket.clamp(max=num_buckets - 1)


def num_buckets_of(longest_seconds: float) -> int:
    """Return how many buckets hold all differences up to ``longest_seconds``."""
    return int(math.log(max(longest_seconds, 1)) / BUCKET_WIDTH) + 1
