"""Attention operators on GPUs, launched as Triton kernels. ``naive.py`` documents the operators.

Nothing here synchronizes with the GPU. If `torch.get_float32_matmul_precision` is "highest" (the default),
matrix products have full fp32 precision, emulated with three TF32 products. Otherwise a single TF32 product
is used.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops.attention import naive
from meshrec.ops.device_copies import copy_to_device, stream_of
from meshrec.ops.library import implement

_HAS_TRITON = importlib.util.find_spec("triton") is not None

MAX_WIDTH = 128
"""Maximum head width for the kernels, because a program keeps a block of rows in registers."""
_PART_BYTES = 1 << 27
"""Maximum memory for partial bias gradients, in bytes. With more samples, the kernel runs several times."""


class _Launch(NamedTuple):
    """Arguments that all kernels in a forward or backward call share."""

    tokens: Any  # AttentionTokens
    samples: Any  # AttentionSamples; num_blocks is 0 until grid_and_samples sets it, per kernel
    biases: Any  # AttentionBiases
    constants: dict[str, Any]  # compile-time arguments, by name

    def grid_and_samples(
        self, num_tokens: int, num_samples: int, num_heads: int = 1
    ) -> tuple[tuple[int], Any]:
        """Return the launch grid for a kernel, and a copy of ``samples`` with the field ``num_blocks`` set.

        The grid is 1-D, with a program per sample, head and token block. ``num_blocks`` is the number of
        blocks per sample. Sample lengths are known only on the GPU, so every sample gets as many blocks as
        the longest possible sample. Surplus programs return at once.

        Args:
            num_tokens: number of tokens in all samples.
            num_samples: number of samples.
            num_heads: number of heads.
        """
        max_tokens = min(self.biases.max_length, num_tokens)
        num_blocks = -(-max_tokens // self.constants["BLOCK"])
        return (num_samples * num_heads * num_blocks,), self.samples._replace(num_blocks=num_blocks)


def jagged_attention(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Compute attention within samples on a GPU, as ``naive.jagged_attention`` does.

    Args:
        query: [M, H, Q].
        key: [N, H, Q].
        value: [N, H, V].
    """
    from meshrec.ops.attention import triton_kernels as kernels

    if not _has_kernel(query, value):
        return naive.jagged_attention(query, key, value, *options)
    launch = _prepare_launch(query, key, value, *options)
    num_queries, num_heads, _ = query.shape
    out = value.new_empty(num_queries, num_heads, value.shape[2])
    is_softmax = launch.constants["SOFTMAX"]
    # SiLU needs none, because its gradient only needs scores.
    log_sums = query.new_empty(num_queries if is_softmax else 0, num_heads)
    grid, samples = launch.grid_and_samples(num_queries, len(options[0]) - 1, num_heads)
    if out.numel():
        kernels.attend[grid](launch.tokens, samples, launch.biases, out, log_sums, **launch.constants)
    return out, log_sums


def jagged_attention_grad(
    grad: Tensor, out: Tensor, log_sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    """Compute the attention gradients on a GPU, as ``naive.jagged_attention_grad`` does.

    Args:
        grad: [M, H, V].
        out: [M, H, V].
        log_sums: [M, H] for softmax.
        query: [M, H, Q].
        key: [N, H, Q].
        value: [N, H, V].
    """
    from meshrec.ops.attention import triton_kernels as kernels

    if not _has_kernel(query, value):
        return naive.jagged_attention_grad(grad, out, log_sums, query, key, value, *options)
    launch = _prepare_launch(query, key, value, *options)
    # Kernels expect a contiguous output gradient.
    grad, is_softmax = grad.contiguous(), launch.constants["SOFTMAX"]
    # Softmax backward needs sum(weight * weight_grad) per query, which equals out . grad (as in
    # FlashAttention).
    deltas = (grad * out).sum(2) if is_softmax else log_sums
    results = kernels.BackwardInputs(grad, log_sums.contiguous(), deltas)
    query_grad, key_grad, value_grad = (x.new_empty(x.shape) for x in (query, key, value))
    num_heads, num_samples = query.shape[1], len(options[0]) - 1
    shared = launch.biases, results
    grid, samples = launch.grid_and_samples(len(query), num_samples, num_heads)
    if query_grad.numel():
        kernels.query_gradients[grid](launch.tokens, samples, *shared, query_grad, **launch.constants)
    # Key gradients need a program per key block instead of per query block.
    grid, samples = launch.grid_and_samples(len(key), num_samples, num_heads)
    if key_grad.numel():
        kernels.key_gradients[grid](launch.tokens, samples, *shared, key_grad, value_grad, **launch.constants)
    position_grad = _bias_grad(launch, results, num_samples, launch.biases.position, False)
    time_grad = _bias_grad(launch, results, num_samples, launch.biases.time, True)
    return query_grad, key_grad, value_grad, position_grad, time_grad


def _bias_grad(launch: _Launch, results: Any, num_samples: int, bias: Tensor | None, is_time: bool) -> Tensor:
    """Return the gradient of a bias, [len(bias)]. If ``bias`` is None, return an empty tensor."""
    from meshrec.ops.attention import triton_bias_kernels

    size = 0 if bias is None else len(bias)
    total: Tensor = results.grad.new_zeros(size)
    (num_blocks,), samples = launch.grid_and_samples(len(results.grad), 1)
    # A part for the position bias has two rows, see bias_gradients.
    rows = 1 if is_time else 2
    # How many samples fit into the memory limit at a time.
    step = max(1, _PART_BYTES // (4 * max(1, num_blocks * rows * size)))
    # Partial gradients for all samples may not fit in memory, so process samples in batches.
    for first in range(0, num_samples if num_blocks and size else 0, step):
        num_parts = min(step, num_samples - first) * num_blocks
        parts = total.new_zeros(num_parts * rows, size)
        triton_bias_kernels.bias_gradients[(num_parts,)](
            launch.tokens,
            samples,
            launch.biases,
            results,
            parts,
            first,
            **launch.constants,
            BUCKETS=max(16, 1 << (size - 1).bit_length()) if is_time else 0,
        )
        # In a fixed order, so equal calls give equal bits.
        total.add_(parts.sum(0))
    return total


def has_kernel_for(query: Tensor, value: Tensor) -> bool:
    """Return whether a Triton kernel supports these tensors: device, dtype and widths."""
    return query.is_cuda and _HAS_TRITON and _has_kernel(query, value)


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernels support the dtype and the head widths."""
    return query.dtype == value.dtype == torch.float32 and max(query.shape[2], value.shape[2]) <= MAX_WIDTH


def _prepare_launch(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> _Launch:
    """Convert the operator's arguments to those of the kernels."""
    from meshrec.ops.attention import triton_kernels as kernels

    offsets, query_offsets, num_targets, position, time, timestamps, max_length, scale, *mask = options
    softmax, causal, window, num_contextual = mask
    # Slices of a fused QKV projection are strided views. The kernels read them without a copy.
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    # Strides per token and per head. The last dimension is contiguous.
    strides = [stride for x in (query, key, value) for stride in x.stride()[:2]]
    # Heads, query width, value width.
    sizes = query.shape[1], query.shape[2], value.shape[2]
    # Cached on the device, because it only depends on the bucket count.
    starts = None if time is None else _bucket_starts(len(time), query.device, stream_of(query.device))
    biases = (x if x is None else x.contiguous() for x in (position, time, timestamps))
    # tl.dot needs dimensions of at least 16.
    widths = [max(16, kernels.next_power_of_2(size)) for size in sizes[1:]]
    return _Launch(
        kernels.AttentionTokens._make([query, key, value, *strides, *sizes, scale]),
        kernels.AttentionSamples(
            offsets.contiguous(), query_offsets.contiguous(), num_targets.contiguous(), 0
        ),
        kernels.AttentionBiases._make([*biases, starts, max_length, 0 if time is None else len(time)]),
        {
            "SOFTMAX": softmax,
            "CAUSAL": causal,
            "WINDOW": window,
            "CONTEXTUAL": num_contextual,
            # Three TF32 products give full fp32 precision.
            "PRECISION": "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32",
            "BLOCK": 32,
            "QUERY_WIDTH": widths[0],
            "VALUE_WIDTH": widths[1],
        },
    )


# The stream is part of the cache key, because the copy is only ordered before kernels on this stream.
@functools.lru_cache(maxsize=64)
def _bucket_starts(num_buckets: int, device: torch.device, stream: int) -> Tensor:
    """Return the smallest time difference in each bucket, in seconds: fp32 [num_buckets], on the device."""
    # From float64, so that the fp32 bounds equal those in naive.time_buckets.
    bounds = [math.exp(naive.BUCKET_WIDTH * k) for k in range(num_buckets)]
    starts = torch.tensor(bounds, dtype=torch.float64)
    return copy_to_device(starts.float(), device)


OPS: list[Callable[..., Any]] = [jagged_attention, jagged_attention_grad]
"""Operators with Triton kernels."""

if _HAS_TRITON:
    implement(OPS, "CUDA")
