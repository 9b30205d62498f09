"""The two halves of DeepFM: Guo et al., "DeepFM: a factorization-machine based neural network" (2017).

Both take the same list of embeddings ``[B, num, dim]`` (or ``[B, dim]``) with equal B. Their widths may
differ.
"""

import torch
from torch import Tensor, nn

torch.fx.wrap("_side_by_side")


class DeepFM(nn.Module):
    """Deep half: concatenated embeddings through ``dense_module``.

    Args:
        dense_module: any module whose input is ``[B, sum of num * dim]``.
    """

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Return the output of ``dense_module`` for the flattened embeddings.

        Args:
            embeddings: tensors [B, ...]; flattened and joined, they are as wide as the module's input.

        Raises:
            ValueError: there are no embeddings, or they have different batch sizes.
        """
        return self.dense_module(_side_by_side(embeddings))  # type: ignore[no-any-return]


class FactorizationMachine(nn.Module):
    """Second-order half: the products of all pairs of elements, ``((sum x)^2 - sum x^2) / 2``.

    As in TorchRec, ``x`` runs over all elements of all embeddings, so that widths may differ. Unlike in the
    paper's sum of dot products, products of different columns count too.
    """

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Return the second-order term, [B, 1].

        Args:
            embeddings: tensors [B, ...] of any width.

        Raises:
            ValueError: there are no embeddings, or they have different batch sizes.
        """
        elements = _side_by_side(embeddings)
        square_of_sum = elements.sum(1, keepdim=True).square()
        sum_of_squares = elements.square().sum(1, keepdim=True)
        return (square_of_sum - sum_of_squares) * 0.5


def _side_by_side(embeddings: list[Tensor]) -> Tensor:
    if len(embeddings) == 0:
        raise ValueError("there is nothing to combine. Give at least one embedding [B, num, dim].")
    batch_sizes = [embedding.size(0) for embedding in embeddings]
    if max(batch_sizes) > min(batch_sizes):
        raise ValueError(f"all embeddings must have one batch size, got {batch_sizes}.")
    return torch.cat([embedding.flatten(1) for embedding in embeddings], dim=1)
