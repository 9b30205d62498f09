"""Attention over jagged sequences in blocks of tokens, with a backward pass that keeps no scores.

Samples of similar length share a group, which is padded to its own longest sample. A block is some rows of
queries of a group with the keys that they may attend to; its scores fit into the processor's cache and are
computed again in the backward pass. Memory beyond the inputs therefore does not grow with the square of a
length.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops.attention.naive import _CAUSAL, _NO_BIAS, Bias, Mask, allowed, time_buckets

# N tokens, H heads, Q and V widths, b samples of a group, r rows and k columns of a block

_ROWS = 64
"""Most rows of queries in a block."""
_BLOCK = 1 << 18
"""Most scores in a block, unless one sample's rows have more: 1 MiB of fp32, about a core's own cache."""
_PADDING = 1.2
"""A group's padded scores are at most this many times the scores of its samples."""


class Settings(NamedTuple):
    """The arguments of an attention that are not differentiated."""

    offsets_B1: Tensor
    max_length: int
    scale: float
    mask: Mask
    timestamps_N: Tensor | None
    num_buckets: int
    num_targets_B: Tensor | None


class _SimilarSamples(NamedTuple):
    """Samples of similar length, as positions in the tokens of all samples."""

    tokens_bl: Tensor
    """The tokens of each sample, padded with N: one past the last token."""
    lengths_b: Tensor
    num_targets_b: Tensor


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
    """Compute `naive.silu_attention` in blocks; differentiable in queries, keys, values and biases.

    Raises:
        ValueError: the sizes of the arguments do not fit each other, or a sample is longer than max_length.
    """
    _check(query_NHQ, key_NHQ, value_NHV, offsets_B1, max_length=max_length, bias=bias)
    timestamps_N = bias.timestamps_N if bias.time_T is not None else None
    num_buckets = 0 if bias.time_T is None else len(bias.time_T)
    settings = Settings(offsets_B1, max_length, scale, mask, timestamps_N, num_buckets, num_targets_B)
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query_NHQ, key_NHQ, value_NHV, bias.position_P, bias.time_T, settings
    )
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_NHQ: Tensor,
        key_NHQ: Tensor,
        value_NHV: Tensor,
        position_P: Tensor | None,
        time_T: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        ctx.save_for_backward(query_NHQ, key_NHQ, value_NHV, position_P, time_T)
        ctx.settings, ctx.groups = settings, _groups(settings, query_NHQ.shape[1])
        out_NHV = torch.zeros_like(value_NHV)
        for group in ctx.groups:
            query, key, value = (_gather(each, group.tokens_bl) for each in (query_NHQ, key_NHQ, value_NHV))
            out = torch.empty_like(value)
            for block in _tiles(group, settings, query.shape[1]):
                scores = block.scores(query, key, position_P, time_T)
                weights = torch.nn.functional.silu(scores, inplace=True).mul_(block.seen_b1rk)
                torch.matmul(weights, value[:, :, block.columns], out=out[:, :, block.rows])
            _scatter(out_NHV, group, out)
        return out_NHV

    @staticmethod
    def backward(ctx: Any, grad_NHV: Tensor) -> tuple[Tensor | None, ...]:
        query_NHQ, key_NHQ, value_NHV, position_P, time_T = ctx.saved_tensors
        inputs = (query_NHQ, key_NHQ, value_NHV)
        grads = [torch.zeros_like(each) for each in inputs]
        bias_grads = [None if each is None else torch.zeros_like(each) for each in (position_P, time_T)]
        for group in ctx.groups:
            query, key, value, grad = (_gather(each, group.tokens_bl) for each in (*inputs, grad_NHV))
            of_query, of_key, of_value = (torch.zeros_like(each) for each in (query, key, value))
            for block in _tiles(group, ctx.settings, query.shape[1]):
                scores = block.scores(query, key, position_P, time_T)
                sigmoid = scores.sigmoid()
                weights = (scores * sigmoid).mul_(block.seen_b1rk)
                of_rows = grad[:, :, block.rows]
                of_value[:, :, block.columns] += weights.transpose(2, 3) @ of_rows
                of_scores = of_rows @ value[:, :, block.columns].transpose(2, 3)
                # d SiLU(s) / ds = sigmoid(s) (1 + s (1 - sigmoid(s)))
                slope = scores.mul_(1 - sigmoid).add_(1).mul_(sigmoid).mul_(block.seen_b1rk)
                of_scores.mul_(slope)
                _add_bias_grads(bias_grads, of_scores, block)
                of_scores.mul_(ctx.settings.scale)
                torch.matmul(of_scores, key[:, :, block.columns], out=of_query[:, :, block.rows])
                of_key[:, :, block.columns] += of_scores.transpose(2, 3) @ query[:, :, block.rows]
            for total, part in zip(grads, (of_query, of_key, of_value), strict=True):
                _scatter(total, group, part)
        return (*grads, *bias_grads, None)


def _check(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, *, max_length: int, bias: Bias
) -> None:
    shapes = f"queries {[*query.shape]}, keys {[*key.shape]} and values {[*value.shape]}"
    if query.dim() != 3 or query.shape != key.shape or query.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"{shapes}: allowed are [N, H, Q], [N, H, Q] and [N, H, V]. Give every token of a "
            "sample, targets included, a query, a key and a value."
        )
    longest = int(offsets.diff().max()) if len(offsets) > 1 else 0
    if int(offsets[-1]) != len(query) or longest > max_length:
        raise ValueError(
            f"the samples have {int(offsets[-1])} tokens, the longest {longest}: the queries have "
            f"{len(query)}, and max_length is {max_length}. Cut longer histories, or raise max_length."
        )
    if bias.position_P is not None and len(bias.position_P) != 2 * max_length - 1:
        raise ValueError(
            f"the position bias has {len(bias.position_P)} entries: max_length {max_length} needs "
            f"{2 * max_length - 1}, one for each distance."
        )
    if bias.time_T is not None and (bias.timestamps_N is None or len(bias.timestamps_N) != len(query)):
        given = "none" if bias.timestamps_N is None else str(len(bias.timestamps_N))
        raise ValueError(f"a time bias needs a timestamp for each of the {len(query)} tokens, got {given}.")


class _Tile(NamedTuple):
    """Some rows of a group's queries, with the columns of keys that they attend to."""

    rows: slice
    columns: slice
    seen_b1rk: Tensor
    """1 / max_length where the row attends to the column, and 0 elsewhere."""
    distance_rk: Tensor
    """The entry of the position bias for each row and column."""
    bucket_brk: Tensor | None
    scale: float

    def scores(
        self, query_bhlq: Tensor, key_bhlq: Tensor, position_P: Tensor | None, time_T: Tensor | None
    ) -> Tensor:
        """Return the biased products of the block's rows and columns, [b, H, r, k]."""
        found = query_bhlq[:, :, self.rows] @ key_bhlq[:, :, self.columns].transpose(2, 3)
        found.mul_(self.scale)
        if position_P is not None:
            found += position_P[self.distance_rk]
        if time_T is not None:
            found += time_T[self.bucket_brk].unsqueeze(1)
        return found


def _groups(settings: Settings, num_heads: int) -> list[_SimilarSamples]:
    """Split the samples into groups of similar length, longest first; samples without tokens are left out."""
    offsets, device = settings.offsets_B1, settings.offsets_B1.device
    lengths_B = offsets.diff()
    num_targets_B = settings.num_targets_B
    targets_B = torch.zeros_like(lengths_B) if num_targets_B is None else num_targets_B
    order_B = lengths_B.argsort(descending=True, stable=True)
    sizes = group_sizes(lengths_B[order_B].tolist(), num_heads)
    num_tokens, groups = int(offsets[-1]), []
    for samples in order_B[: sum(sizes)].split(sizes):
        lengths_b = lengths_B[samples]
        places_l = torch.arange(int(lengths_b[0]), device=device)
        tokens_bl = offsets[samples, None] + places_l
        tokens_bl = tokens_bl.masked_fill(places_l >= lengths_b[:, None], num_tokens)
        groups.append(_SimilarSamples(tokens_bl, lengths_b, targets_B[samples]))
    return groups


def group_sizes(lengths: Sequence[int], num_heads: int) -> list[int]:
    """Return the sizes of the groups, for lengths in descending order; empty samples are in no group."""
    sizes: list[int] = []
    longest = needed = most = 0
    for length in lengths:
        if length == 0:
            break
        needed += length**2
        if sizes and sizes[-1] < most and (sizes[-1] + 1) * longest**2 <= _PADDING * needed:
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest, needed = length, length**2
            most = _BLOCK // (num_heads * longest * min(longest, _ROWS))
    return sizes


def _tiles(group: _SimilarSamples, settings: Settings, num_heads: int) -> Iterator[_Tile]:
    """Yield the blocks of a group. Where the mask is causal, the columns behind the rows are left out."""
    mask, device = settings.mask, group.tokens_bl.device
    num_samples, longest = group.tokens_bl.shape
    lengths, targets = group.lengths_b[:, None, None], group.num_targets_b[:, None, None]
    times_bl = following_bl = None
    if settings.timestamps_N is not None:
        times_bl = _gather(settings.timestamps_N, group.tokens_bl)
        following_bl = times_bl.roll(-1, dims=1)
        last_b1 = group.lengths_b[:, None] - 1
        following_bl.scatter_(1, last_b1, times_bl.gather(1, last_b1))
    step = max(1, min(_ROWS, _BLOCK // (num_samples * num_heads * longest)))
    for first in range(0, longest, step):
        end = min(first + step, longest)
        row = torch.arange(first, end, device=device)[:, None]
        column = torch.arange(end if mask.causal and first >= mask.num_contextual else longest, device=device)
        bucket_brk = None
        if times_bl is not None and following_bl is not None:
            apart_brk = following_bl[:, first:end, None] - times_bl[:, None, : len(column)]
            bucket_brk = time_buckets(apart_brk, settings.num_buckets)
        seen_brk = allowed(row, column, lengths, targets, mask)
        yield _Tile(
            slice(first, end),
            slice(0, len(column)),
            (seen_brk.float() / settings.max_length).unsqueeze(1),
            settings.max_length - 1 + column - row,
            bucket_brk,
            settings.scale,
        )


def _gather(tokens: Tensor, tokens_bl: Tensor) -> Tensor:
    """Return the tokens of a group: [b, l] of [N], and [b, H, l, D] of [N, H, D].

    Padding is a copy of the last token, so that it is finite.
    """
    found = tokens[tokens_bl.clamp(max=len(tokens) - 1)]
    return found if tokens.dim() == 1 else found.transpose(1, 2).contiguous()


def _scatter(tokens_NHD: Tensor, group: _SimilarSamples, values_bhld: Tensor) -> None:
    """Write a group's tokens to where they come from; every token is in one group."""
    valid_bl = group.tokens_bl < len(tokens_NHD)
    tokens_NHD[group.tokens_bl[valid_bl]] = values_bhld.transpose(1, 2)[valid_bl]


def _add_bias_grads(grads: Sequence[Tensor | None], of_scores_bhrk: Tensor, block: _Tile) -> None:
    """Add the gradients of the position and the time bias that the scores of a block give."""
    of_position, of_time = grads
    if of_position is None and of_time is None:
        return
    of_heads_brk = of_scores_bhrk.sum(1)
    if of_position is not None:
        of_position.index_add_(0, block.distance_rk.flatten(), of_heads_brk.sum(0).flatten())
    if of_time is not None:
        assert block.bucket_brk is not None
        of_time.index_add_(0, block.bucket_brk.flatten(), of_heads_brk.flatten())
