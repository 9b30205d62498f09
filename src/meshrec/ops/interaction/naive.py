"""Pairwise dot products between the vectors of a sample, in plain torch.

The reference for the kernels, and the fallback without them. A sample has a dense vector (number 0) and F
sparse vectors (numbers 1 to F). Sparse vectors with another dtype are rounded to the dtype of the dense
vector. Shape legend: B samples, F sparse vectors per sample, D vector width, V = F + 1 vectors,
P = V (V - 1) / 2 pairs.
"""

from typing import Any

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.library import implement, register_fakes


def dot_interaction(dense_BD: Tensor, sparse_BFD: Tensor) -> Tensor:
    """Return the dense vector of each sample, followed by the dot product for each vector pair.

    Returns:
        [B, D + P]; the pairs are in the order (0, 1), (0, 2), ... (0, F), (1, 2), ...
    """
    vectors_BVD = _vectors(dense_BD, sparse_BFD)
    products_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
    # The products are a symmetric matrix, so keep only the part above the diagonal.
    rows, columns = _pairs(vectors_BVD)
    return torch.cat([dense_BD, products_BVV[:, rows, columns]], dim=1)


def dot_interaction_grad(grad: Tensor, dense_BD: Tensor, sparse_BFD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients for both inputs, with the input dtypes.

    Args:
        grad: output gradient [B, D + P].
    """
    vectors_BVD = _vectors(dense_BD, sparse_BFD)
    num_vectors, dim = vectors_BVD.shape[1:]
    rows, columns = _pairs(vectors_BVD)
    products_BVV = grad.new_zeros(grad.shape[0], num_vectors, num_vectors)
    # The gradient of a product reaches both vectors, so fill both triangles.
    products_BVV[:, rows, columns] = grad[:, dim:]
    products_BVV[:, columns, rows] = grad[:, dim:]
    vectors_grad = torch.bmm(products_BVV, vectors_BVD)
    sparse_grad = vectors_grad[:, 1:].to(sparse_BFD.dtype)
    return vectors_grad[:, 0] + grad[:, :dim], sparse_grad.contiguous()


def _vectors(dense_BD: Tensor, sparse_BFD: Tensor) -> Tensor:
    """Return all vectors of each sample, the dense vector first: [B, V, D]."""
    # Tables return fp32 also if the dense part is bf16.
    if sparse_BFD.dtype != dense_BD.dtype:
        sparse_BFD = sparse_BFD.to(dense_BD.dtype)
    return torch.cat([dense_BD.unsqueeze(1), sparse_BFD], dim=1)


def _pairs(vectors_BVD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the second vector number for each pair, int64 [P]."""
    num_vectors = vectors_BVD.shape[1]
    pairs = torch.triu_indices(num_vectors, num_vectors, offset=1, device=vectors_BVD.device)
    return pairs[0], pairs[1]


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    # The backward pass recomputes the products, which need more memory than the inputs.
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    dense_grad, sparse_grad = operators.dot_interaction_grad(grad, *ctx.saved_tensors)
    return dense_grad, sparse_grad


def _fake(dense: Tensor, sparse: Tensor) -> Tensor:
    num_sparse = sparse.shape[1]
    return dense.new_empty(dense.shape[0], dense.shape[1] + num_sparse * (num_sparse + 1) // 2)


implement([dot_interaction, dot_interaction_grad])
# Shapes for tracing, and the gradient, shared by all kernels.
register_fakes(
    dot_interaction=_fake,
    dot_interaction_grad=lambda grad, dense, sparse: (
        dense.new_empty(dense.shape),
        sparse.new_empty(sparse.shape),
    ),
)
torch.library.register_autograd("meshrec::dot_interaction", _backward, setup_context=_setup_context)
