"""The two parts of DeepFM: a deep network, and a factorization machine.

Guo et al., "DeepFM: a factorization-machine based neural network" (2017). Both parts take the same list of
embeddings, [B, num, dim] or [B, dim], with equal B. The other sizes may differ.
"""

import torch
from torch import Tensor, nn

# Traced as a single node: the loop over batch sizes must not be unrolled or evaluated on proxies.
torch.fx.wrap("_concatenate")


class DeepFM(nn.Module):
    """Deep part of DeepFM: flattens and concatenates embeddings, and passes them to ``dense_module``.

    Args:
        dense_module: Module whose input is [B, total width of the flattened embeddings].
    """

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Return the output of ``dense_module`` for the flattened embeddings.

        Args:
            embeddings: Tensors [B, ...] whose flattened widths add up to the module's input width.

        Raises:
            ValueError: The list is empty, or the batch sizes differ.
        """
        return self.dense_module(_concatenate(embeddings))  # type: ignore[no-any-return]


class FactorizationMachine(nn.Module):
    """Factorization machine part: the sum of ``x_i x_j`` over all pairs i < j, ``((sum x)^2 - sum x^2) / 2``.

    As in TorchRec, ``x`` runs over all elements of all embeddings, so widths may differ. Unlike the
    paper's sum of dot products, this includes products between different columns.
    """

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Return the second-order term, [B, 1].

        Args:
            embeddings: Tensors [B, ...] of any width.

        Raises:
            ValueError: The list is empty, or the batch sizes differ.
        """
        elements = _concatenate(embeddings)
        square_of_sum = elements.sum(1, keepdim=True).square()
        sum_of_squares = elements.square().sum(1, keepdim=True)
        return (square_of_sum - sum_of_squares) * 0.5


def _concatenate(embeddings: list[Tensor]) -> Tensor:
    """Return the flattened embeddings side by side, [B, sum of num * dim]."""
    if len(embeddings) == 0:
        raise ValueError("the list of embeddings is empty. Give at least one embedding [B, num, dim].")
    batch_sizes = [embedding.size(0) for embedding in embeddings]
    if max(batch_sizes) > min(batch_sizes):
        raise ValueError(f"all embeddings must have the same batch size, got {batch_sizes}.")
    return torch.cat([embedding.flatten(1) for embedding in embeddings], dim=1)
