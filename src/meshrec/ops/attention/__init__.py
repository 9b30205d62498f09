"""Attention within the samples of a jagged batch; ``naive.py`` has the formula."""

import functools
import logging
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.attention import triton
from meshrec.ops.attention.naive import BUCKET_WIDTH, time_buckets
from meshrec.ops.device_copies import copy_to_host

__all__ = ["Bias", "Mask", "jagged_attention", "num_time_buckets", "time_buckets"]

# Shape legend: N tokens, M queries, B samples, H heads, Q width of queries and keys, V width of values.


class Mask(NamedTuple):
    """Which tokens of a sample each token attends to.

    A sample consists of contextual tokens, a history in time order, and targets: candidate items to score. A
    target attends to itself, to contextual tokens and to the history. No other token attends to a target, so
    the result for a target does not depend on the other targets.
    """

    causal: bool = True
    """Whether a history token attends only to itself and earlier tokens."""
    window: int = 0
    """If above 0, tokens attend only to contextual tokens and to tokens less than ``window`` positions away.

    Positions are counted within the sample. 0: no window.
    """
    num_contextual: int = 0
    """Number of contextual tokens at the start of every sample. They attend to all tokens except targets."""


class Bias(NamedTuple):
    """Learned biases to add to the attention scores of all heads. A field that is None adds nothing."""

    position_P: Tensor | None = None
    """Bias per relative position, fp32 [2 max_length - 1].

    For query position i and key position j in a sample, the entry is max_length - 1 + j - i.
    """
    time_T: Tensor | None = None
    """Bias per time difference between query and key, fp32 [T]. `time_buckets` maps a difference to an entry.

    The time of a query in the history is the timestamp of the next token, which is known when the next item
    is requested. The last history token and the targets use their own timestamps.
    """
    timestamps_N: Tensor | None = None
    """Timestamp of every token in seconds, int64 [N]. Required with ``time_T``."""


# Default arguments, created once.
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
    """Compute attention within every sample of a jagged batch.

    Differentiable in queries, keys, values and biases. The kernels process tiles (a block of queries by a
    block of keys), whose scores stay in cache; the backward pass computes the scores again. Samples are
    therefore not padded, and memory does not grow with the square of the sample length. On a GPU, checking
    the offsets synchronizes once.

    The batch has N tokens and M queries in B samples. There are H heads. Queries and keys have Q values per
    head, and values have V.

    Args:
        query_MHQ: queries, fp32 [M, H, Q].
        key_NHQ: keys, fp32 [N, H, Q].
        value_NHV: values, fp32 [N, H, V].
        offsets_B1: first token index per sample, followed by N; int64 [B + 1].
        max_length: maximum number of tokens in a sample. ``"silu"`` divides the weights by it.
        kind: attention weights: ``SiLU(scale q k^T + bias) / max_length``, or a softmax over the allowed
            keys.
        mask: which keys a query attends to.
        bias: biases to add to the scores.
        num_targets_B: number of targets at the end of every sample, int64 [B]. None: no targets.
        query_offsets_B1: first query index per sample, followed by M; int64 [B + 1]. The queries of a
            sample belong to its last tokens. With cached keys and values for the history, only new tokens
            need queries. None: all tokens have queries.

    Returns:
        Attention output per query and head, fp32 [M, H, V].

    Raises:
        ValueError: argument sizes do not match, or a sample is longer than ``max_length``.

    Example::

        tokens = torch.randn(5, 2, 8)  # samples with 2 and 3 tokens, 2 heads
        offsets = torch.tensor([0, 2, 5])
        out = jagged_attention(tokens, tokens, tokens, offsets, max_length=3, kind="softmax")
        assert out.shape == (5, 2, 8)
        assert torch.allclose(out[0], tokens[0])  # the first token attends only to itself
    """
    queries = offsets_B1 if query_offsets_B1 is None else query_offsets_B1
    # Checks read tensors, which tracing cannot do.
    if not torch.compiler.is_compiling():
        if not query_MHQ.is_cpu and not triton.has_kernel_for(query_MHQ, value_NHV):
            _warn_about_fallback(query_MHQ.device.type)
        _check(query_MHQ, key_NHQ, value_NHV, offsets_B1, queries, max_length=max_length, bias=bias)
    # The operator takes no optional target counts, so pass zeros.
    targets = torch.zeros_like(offsets_B1[1:]) if num_targets_B is None else num_targets_B
    # Timestamps matter only with a time bias.
    has_time = bias.time_T is not None
    out: Tensor = operators.jagged_attention(
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


def num_time_buckets(max_seconds: float) -> int:
    """Return how many time buckets (T) cover time differences up to ``max_seconds``."""
    return int(math.log(max(max_seconds, 1)) / BUCKET_WIDTH) + 1


@functools.cache  # warn once per device type
def _warn_about_fallback(device: str) -> None:
    """Warn, once per device type, that the slow plain torch version runs."""
    _logger.warning(
        "jagged attention has no kernel for these tensors on %s: plain torch computes it, one sample at a "
        "time, with all scores of a sample in memory. The kernels for GPUs need Triton, float32, and head "
        "widths up to %d.",
        device,
        triton.MAX_WIDTH,
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
    """Raise ValueError unless the argument sizes for ``jagged_attention`` match."""
    if query.dim() != 3 or query.shape[1:] != key.shape[1:] or key.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"queries {[*query.shape]}, keys {[*key.shape]} and values {[*value.shape]}: allowed are "
            "[M, H, Q], [N, H, Q] and [N, H, V]. Give every token of a sample, targets included, a key and a "
            "value."
        )
    # NumPy, because a server runs this in every layer for every request, and torch is slower on small
    # tensors.
    bounds, query_bounds = (tensor.numpy() for tensor in copy_to_host([offsets, query_offsets]))
    lengths, nums = bounds[1:] - bounds[:-1], query_bounds[1:] - query_bounds[:-1]
    # The kernels index the position bias without bounds checks, so longer samples must not reach them.
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
