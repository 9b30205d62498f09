"""The mean over ranks in the order of ranks, in plain torch: the reference for the kernel, and the fallback."""

import torch
from torch import Tensor

from meshrec.ops.library import implement

# R ranks, N elements


def average_ranks(mean: Tensor, terms: list[Tensor], num_ranks: int, link: int = 0, exchange: int = 0) -> None:
    """Write the mean of ``terms`` to ``mean``.

    Terms are added in their order, then the sum is multiplied by 1 / R once. Both steps are in float32 (in
    float64 for float64 values), so that the bits do not depend on the instruction set.

    Args:
        mean: [N], contiguous, of float64, float32, float16 or bfloat16. It may be one of the terms.
        terms: R tensors like ``mean``, in the order of ranks. Empty if the kernel reads them from a link.
        num_ranks: R.
        link: the handle of a ``HostLink`` whose ranks hold the terms; 0 without one.
        exchange: the number of the exchange on the link.

    Raises:
        ValueError: the number of terms, their sizes or their types do not fit.
    """
    assert link == 0, "only compiled kernels open links"
    if len(terms) != num_ranks:
        raise ValueError(f"got {len(terms)} terms for {num_ranks} ranks")
    if any(term.shape != mean.shape or term.dtype != mean.dtype for term in terms):
        raise ValueError(
            "terms must be contiguous, and have the type and the "
            f"{mean.numel()} elements of the mean"
        )
    total = terms[0].to(torch.float64 if mean.dtype == torch.float64 else torch.float32, copy=True)
    for term in terms[1:]:
        total += term
    mean.copy_(total.mul_(1 / num_ranks))


implement([average_ranks])
