"""``torch.ops.meshrec.jagged_attention``: attention within jagged samples; see ``naive.py``."""

import functools
import logging
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshrec.ops.attention import (
    autograd,  # noqa: F401 - registers the gradient
    fakes,  # noqa: F401 - registers the shapes
    triton,
)
from meshrec.ops.attention.naive import BUCKET_WIDTH, time_buckets
from meshrec.ops.sending import read_together

__all__ = ["Bias", "Mask", "jagged_attention", "num_buckets_of", "time_buckets"]

# N tokens, M queries, B samples, H heads, Q width of queries and keys, V width of values


class Mask(NamedTuple):
    """The tokens of a sample that a token attends to.

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
    """The biases of the scaled dot products, the same for all heads. None: no bias."""

    position_P: Tensor | None = None
    """Learned, fp32 [2 max_length - 1]; token i attends to token j with entry max_length - 1 + j - i."""
    time_T: Tensor | None = None
    """Learned, fp32 [T], by the bucket of the time between the query and a token.

    The time of a query in the history is that of the token after it, which is known when the next item is
    asked for. The last token of the history and the targets keep their own times.
    """
    timestamps_N: Tensor | None = None
    """Times of the tokens in seconds, int64; needed with ``time_T``."""


_CAUSAL, _NO_BIAS = Mask(), Bias()
_logger = logging.getLogger("meshrec")


def jagged_attention(
    query_MHQ: Tensor,
    key_NHQ: Tensor,
    value_NHV: Tensor,
    offsets_B1: Tensor,
    *,
    max_length: int,
    kind: Literal["silu", "softmax"] = "silu",
    scale: float = 1.0,
    mask: Mask = _CAUSAL,
    bias: Bias = _NO_BIAS,
    num_targets_B: Tensor | None = None,
    query_offsets_B1: Tensor | None = None,
) -> Tensor:
    """Compute attention within each sample; differentiable in queries, keys, values and biases.

    The work is done in tiles of queries and keys whose scores stay in the cache; the backward pass computes
    them again. So no sample is padded, and memory does not grow with the square of a length. On a GPU,
    checking the offsets reads the device once.

    Args:
        query_MHQ, key_NHQ, value_NHV: the tokens of all samples.
        offsets_B1: where each sample begins, and N; int64 [B + 1].
        max_length: the largest length of a sample, and the divisor of the weights of ``"silu"``.
        kind: the weights are ``SiLU(scale q k^T + bias) / max_length``, or a softmax over the allowed keys.
        scale: the factor of the dot products.
        num_targets_B: the number of targets at the end of each sample, int64 [B]; None: no targets.
        query_offsets_B1: where the queries of each sample begin, and M. They are those of its last tokens: a
            history whose keys and values are kept needs queries of new tokens only. None: of all tokens.

    Returns: [M, H, V].

    Raises:
        ValueError: the sizes of the arguments do not fit each other, or a sample is longer than max_length.
    """
    queries = offsets_B1 if query_offsets_B1 is None else query_offsets_B1
    if not torch.compiler.is_compiling():
        if not query_MHQ.is_cpu and not triton.serves(query_MHQ, value_NHV):
            _tell_of_plain_torch(query_MHQ.device.type)
        _check(query_MHQ, key_NHQ, value_NHV, offsets_B1, queries, max_length=max_length, bias=bias)
    targets = torch.zeros_like(offsets_B1[1:]) if num_targets_B is None else num_targets_B
    has_time = bias.time_T is not None
    out: Tensor = torch.ops.meshrec.jagged_attention.default(
        query_MHQ,
        key_NHQ,
        value_NHV,
        offsets_B1,
        queries,
        targets,
        bias.position_P,
        bias.time_T,
        bias.timestamps_N if has_time else None,
        max_length,
        scale,
        kind == "softmax",
        *mask,
    )[0]
    return out


def num_buckets_of(longest_seconds: float) -> int:
    """Return how many buckets hold all differences up to ``longest_seconds``."""
    return int(math.log(max(longest_seconds, 1)) / BUCKET_WIDTH) + 1


@functools.cache
def _tell_of_plain_torch(device: str) -> None:
    _logger.warning(
        "jagged attention has no kernel for these tensors on %s: plain torch computes it, one sample at a "
        "time, with all scores of a sample in memory. The kernels for GPUs need Triton, float32, and heads "
        "of at most %d numbers.",
        device,
        triton.WIDEST,
    )


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    query_offsets: Tensor,
    *,
    max_length: int,
    bias: Bias,
) -> None:
    if query.dim() != 3 or query.shape[1:] != key.shape[1:] or key.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"queries {[*query.shape]}, keys {[*key.shape]} and values {[*value.shape]}: allowed are "
            "[M, H, Q], [N, H, Q] and [N, H, V]. Give every token of a sample, targets included, a key and a "
            "value."
        )
    # NumPy, as this runs in each layer of each request that a server answers.
    bounds, query_bounds = (each.numpy() for each in read_together([offsets, query_offsets]))
    lengths, nums = bounds[1:] - bounds[:-1], query_bounds[1:] - query_bounds[:-1]
    longest = lengths.max(initial=0)
    if bounds[-1] != len(key) or query_bounds[-1] != len(query) or longest > max_length:
        raise ValueError(
            f"the samples have {bounds[-1]} tokens and {query_bounds[-1]} queries, the longest "
            f"{longest} tokens: {len(key)} keys and {len(query)} queries are given, and max_length is "
            f"{max_length}. Cut longer histories, or raise max_length."
        )
    if len(lengths) != len(nums) or (nums > lengths).any():
        raise ValueError(
            f"{len(lengths)} samples have tokens and {len(nums)} have queries, and no "
            "sample may have more queries than tokens. Give the queries of the last tokens of each sample."
        )
    if bias.position_P is not None and len(bias.position_P) != 2 * max_length - 1:
        raise ValueError(
            f"the position bias has {len(bias.position_P)} entries: max_length {max_length} needs "
            f"{2 * max_length - 1}, one for each distance."
        )
    if bias.time_T is not None and (bias.timestamps_N is None or len(bias.timestamps_N) != len(key)):
        given = "none" if bias.timestamps_N is None else str(len(bias.timestamps_N))
        raise ValueError(f"a time bias needs a timestamp for each of the {len(key)} tokens, got {given}.")
