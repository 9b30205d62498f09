"""Attention within jagged samples on GPUs, as Triton kernels. ``naive.py`` describes the ops.

Nothing reads the GPU. Where `torch.get_float32_matmul_precision` is "highest", the default, three products of
TF32 stand for one of fp32 and keep its precision; else one product of TF32 does.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops.attention import naive
from meshrec.ops.library import implement
from meshrec.ops.sending import sent_to, stream_of

_HAS_TRITON = importlib.util.find_spec("triton") is not None

WIDEST = 128
"""The largest width of a head that has a kernel, because a program keeps the rows of a block in registers."""
_PART_BYTES = 1 << 27
"""The memory of the parts of bias gradients that are added at once."""


class _Launch(NamedTuple):
    """The arguments that all kernels of a call share."""

    tokens: Any
    samples: Any
    biases: Any
    constants: dict[str, Any]

    def over(self, num_tokens: int, num_samples: int, num_heads: int = 1) -> tuple[tuple[int], Any]:
        """Return the grid for blocks of up to so many tokens of each sample, and the samples with it."""
        longest = min(self.biases.max_length, num_tokens)
        num_blocks = -(-longest // self.constants["BLOCK"])
        return (num_samples * num_heads * num_blocks,), self.samples._replace(num_blocks=num_blocks)


def jagged_attention(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Compute ``naive.jagged_attention`` with Triton kernels."""
    from meshrec.ops.attention import triton_kernels as kernels

    if not _has_kernel(query, value):
        return naive.jagged_attention(query, key, value, *options)
    launch = _launch_of(query, key, value, *options)
    num_queries, num_heads, _ = query.shape
    out = value.new_empty(num_queries, num_heads, value.shape[2])
    is_softmax = launch.constants["SOFTMAX"]
    log_sums = query.new_empty(num_queries if is_softmax else 0, num_heads)
    grid, samples = launch.over(num_queries, len(options[0]) - 1, num_heads)
    if out.numel():
        kernels.attend[grid](launch.tokens, samples, launch.biases, out, log_sums, **launch.constants)
    return out, log_sums


def jagged_attention_grad(
    grad: Tensor, out: Tensor, log_sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    """Compute ``naive.jagged_attention_grad`` with Triton kernels."""
    from meshrec.ops.attention import triton_kernels as kernels

    if not _has_kernel(query, value):
        return naive.jagged_attention_grad(grad, out, log_sums, query, key, value, *options)
    launch = _launch_of(query, key, value, *options)
    grad, is_softmax = grad.contiguous(), launch.constants["SOFTMAX"]
    deltas = (grad * out).sum(2) if is_softmax else log_sums
    results = kernels.AttentionResults(grad, log_sums.contiguous(), deltas)
    of_query, of_key, of_value = (each.new_empty(each.shape) for each in (query, key, value))
    num_heads, num_samples = query.shape[1], len(options[0]) - 1
    shared = launch.biases, results
    grid, samples = launch.over(len(query), num_samples, num_heads)
    if of_query.numel():
        kernels.of_queries[grid](launch.tokens, samples, *shared, of_query, **launch.constants)
    grid, samples = launch.over(len(key), num_samples, num_heads)
    if of_key.numel():
        kernels.of_keys[grid](launch.tokens, samples, *shared, of_key, of_value, **launch.constants)
    of_position = _of_bias(launch, results, num_samples, launch.biases.position, False)
    of_time = _of_bias(launch, results, num_samples, launch.biases.time, True)
    return of_query, of_key, of_value, of_position, of_time


def _of_bias(launch: _Launch, results: Any, num_samples: int, bias: Tensor | None, is_time: bool) -> Tensor:
    """Return the gradient of a bias: the sum of the parts of all blocks of queries. Empty for no bias."""
    from meshrec.ops.attention import triton_bias_kernels

    size = 0 if bias is None else len(bias)
    total: Tensor = results.grad.new_zeros(size)
    (num_blocks,), samples = launch.over(len(results.grad), 1)
    rows = 1 if is_time else 2
    step = max(1, _PART_BYTES // (4 * max(1, num_blocks * rows * size)))
    for first in range(0, num_samples if num_blocks and size else 0, step):
        num_parts = min(step, num_samples - first) * num_blocks
        parts = total.new_zeros(num_parts * rows, size)
        triton_bias_kernels.of_biases[(num_parts,)](
            launch.tokens,
            samples,
            launch.biases,
            results,
            parts,
            first,
            **launch.constants,
            BUCKETS=max(16, 1 << (size - 1).bit_length()) if is_time else 0,
        )
        total.add_(parts.sum(0))
    return total


def serves(query: Tensor, value: Tensor) -> bool:
    """Return whether a kernel computes attention of such queries and values on their device."""
    return query.is_cuda and _HAS_TRITON and _has_kernel(query, value)


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    return query.dtype == value.dtype == torch.float32 and max(query.shape[2], value.shape[2]) <= WIDEST


def _launch_of(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> _Launch:
    from meshrec.ops.attention import triton_kernels as kernels

    offsets, query_offsets, num_targets, position, time, timestamps, max_length, scale, *rest = options
    softmax, causal, window, num_contextual = rest
    # Parts of one projection are read where they are.
    query, key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (query, key, value))
    strides = [stride for each in (query, key, value) for stride in each.stride()[:2]]
    sizes = query.shape[1], query.shape[2], value.shape[2]
    begins = None if time is None else _begins(len(time), query.device, stream_of(query.device))
    biases = (each if each is None else each.contiguous() for each in (position, time, timestamps))
    widths = [max(16, kernels.next_power_of_2(each)) for each in sizes[1:]]
    return _Launch(
        kernels.AttentionTokens._make([query, key, value, *strides, *sizes, scale]),
        kernels.AttentionSamples(
            offsets.contiguous(), query_offsets.contiguous(), num_targets.contiguous(), 0
        ),
        kernels.AttentionBiases._make([*biases, begins, max_length, 0 if time is None else len(time)]),
        {
            "SOFTMAX": softmax,
            "CAUSAL": causal,
            "WINDOW": window,
            "CONTEXTUAL": num_contextual,
            "PRECISION": "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32",
            "BLOCK": 32,
            "QUERY_WIDTH": widths[0],
            "VALUE_WIDTH": widths[1],
        },
    )


@functools.lru_cache(maxsize=64)
def _begins(num_buckets: int, device: torch.device, stream: int) -> Tensor:
    """Return the smallest difference of each time bucket, which ``naive.time_buckets`` compares, too."""
    numbers = [math.exp(naive.BUCKET_WIDTH * k) for k in range(num_buckets)]
    begins = torch.tensor(numbers, dtype=torch.float64)
    return sent_to(begins.float(), device)


OPS: list[Callable[..., Any]] = [jagged_attention, jagged_attention_grad]
"""The ops that have Triton kernels."""

if _HAS_TRITON:
    implement(OPS, "CUDA")
