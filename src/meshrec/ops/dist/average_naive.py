"""Mean over ranks, added in rank order, in plain torch: the reference for the kernel, and the fallback."""

import torch
from torch import Tensor

from meshrec.ops.library import implement

# Shape legend: R ranks, N elements.


def average_ranks(
    mean: Tensor, terms: list[Tensor], num_ranks: int, link: int = 0, exchange: int = 0
) -> None:
    """Write the mean over R tensors, one from each rank, to ``mean``.

    The tensors are added in rank order, then the sum is multiplied once by 1 / R. Both steps use float32
    (float64 if the values are float64). The result bits therefore depend neither on timing nor on the
    instruction set.

    Args:
        mean: output [N], contiguous, float64, float32, float16 or bfloat16. May be the same tensor as one of
            ``terms``.
        link: handle of a ``HostLink``, through which the compiled kernel reads the terms from the memory of
            the other ranks' processes (comms/host_link.py). 0: no link.
        exchange: number of this exchange on the link, equal on all ranks. Not read without a link.

    Raises:
        ValueError: wrong number, size or dtype of the terms.
    """
    assert link == 0, "only compiled kernels open links"
    if len(terms) != num_ranks:
        raise ValueError(f"got {len(terms)} terms for {num_ranks} ranks")
    if any(term.shape != mean.shape or term.dtype != mean.dtype for term in terms):
        raise ValueError(
            f"terms must be contiguous, and have the type and the {mean.numel()} elements of the mean"
        )
    # A copy, because ``mean`` may be a term, and is written only at the end.
    total = terms[0].to(torch.float64 if mean.dtype == torch.float64 else torch.float32, copy=True)
    for term in terms[1:]:
        # One rank after another: the order decides the rounding.
        total += term
    # Multiply once by the reciprocal, as the kernels do: a division could round differently.
    mean.copy_(total.mul_(1 / num_ranks))


implement([average_ranks])
