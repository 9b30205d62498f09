"""Several labels at once: a shared bottom, or experts that each task mixes as it needs.

Ma et al.: "Modeling task relationships in multi-task learning with multi-gate mixture-of-experts" (2018);
Tang et al.: "Progressive layered extraction (PLE): a novel multi-task learning model for personalized
recommendations" (2020).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshrec.models.dlrm import OverArch
from meshrec.modules import MLP, EmbeddingBagCollection
from meshrec.sparse import KeyedJaggedTensor

# B batch, T tasks, E experts, I input columns, H hidden columns


class Mixture(nn.Module, ABC):
    """From what all tasks share to a vector for each."""

    @abstractmethod
    def forward(self, shared_BI: Tensor) -> list[Tensor]:
        """[B, I] -> T times [B, H]."""


class SharedBottom(Mixture):
    """One MLP, whose vector all tasks take.

    Args:
        in_features: I.
        layer_sizes: of the MLP; the last is H.
        num_tasks: T.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], num_tasks: int) -> None:
        super().__init__()
        self.bottom = MLP(in_features, layer_sizes)
        self._num_tasks = num_tasks

    def forward(self, shared_BI: Tensor) -> list[Tensor]:
        """See `Mixture`."""
        return [self.bottom(shared_BI)] * self._num_tasks


class MMoE(Mixture):
    """Experts, of which each task takes its own mixture: a softmax of the input says how much of which.

    Args:
        in_features: I.
        layer_sizes: of each expert; the last is H.
        num_tasks: T.
        num_experts: E.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], num_tasks: int, num_experts: int = 4
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MLP(in_features, layer_sizes) for _ in range(num_experts))
        self.gates = nn.ModuleList(nn.Linear(in_features, num_experts) for _ in range(num_tasks))

    def forward(self, shared_BI: Tensor) -> list[Tensor]:
        """See `Mixture`."""
        experts = [expert(shared_BI) for expert in self.experts]
        return [_mixed(gate(shared_BI), experts) for gate in self.gates]


class PLE(Mixture):
    """Layers of experts, some shared and some of one task: a task mixes the shared ones with its own.

    Args:
        in_features: I.
        layer_sizes: of each expert in each layer; the last is H.
        num_tasks: T.
        num_shared: shared experts of a layer.
        num_own: experts of each task of a layer.
        num_layers: layers; between them the shared vector mixes all experts.
    """

    def __init__(
        self,
        in_features: int,
        layer_sizes: Sequence[int],
        num_tasks: int,
        num_shared: int = 2,
        num_own: int = 2,
        num_layers: int = 2,
    ) -> None:
        super().__init__()
        widths = [in_features] + [layer_sizes[-1]] * (num_layers - 1)
        self.layers = nn.ModuleList(
            _Extraction(width, layer_sizes, num_tasks, num_shared, num_own, is_last=number == num_layers - 1)
            for number, width in enumerate(widths)
        )
        self._num_tasks = num_tasks

    def forward(self, shared_BI: Tensor) -> list[Tensor]:
        """See `Mixture`."""
        vectors = [shared_BI] * (self._num_tasks + 1)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors[: self._num_tasks]


class _Extraction(nn.Module):
    """A layer of PLE: vectors of all tasks, then the shared one."""

    def __init__(
        self,
        in_features: int,
        layer_sizes: Sequence[int],
        num_tasks: int,
        num_shared: int,
        num_own: int,
        *,
        is_last: bool,
    ) -> None:
        super().__init__()

        def experts(num: int) -> nn.ModuleList:
            return nn.ModuleList(MLP(in_features, layer_sizes) for _ in range(num))

        self.shared = experts(num_shared)
        self.own = nn.ModuleList(experts(num_own) for _ in range(num_tasks))
        self.gates = nn.ModuleList(nn.Linear(in_features, num_own + num_shared) for _ in range(num_tasks))
        all_experts = num_tasks * num_own + num_shared
        self.shared_gate = None if is_last else nn.Linear(in_features, all_experts)

    def forward(self, vectors: list[Tensor]) -> list[Tensor]:
        *tasks, common = vectors
        shared = [expert(common) for expert in self.shared]
        own = [
            [expert(vector) for expert in experts]  # type: ignore[attr-defined]
            for vector, experts in zip(tasks, self.own, strict=True)
        ]
        found = [
            _mixed(gate(vector), [*mine, *shared])
            for gate, vector, mine in zip(self.gates, tasks, own, strict=True)
        ]
        if self.shared_gate is not None:
            found.append(_mixed(self.shared_gate(common), [each for mine in own for each in mine] + shared))
        return found


class MultiTask(nn.Module):
    """Embeddings and dense values side by side, a mixture, and a tower for each task.

    Args:
        embedding_bag_collection: the tables; widths may differ.
        dense_in_features: columns of the dense input.
        mixture: takes all columns of both, and gives H columns for each task.
        tower_layer_sizes: hidden layers of each task's tower.
        num_tasks: T.
        mixture_out: H.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        mixture: Mixture,
        tower_layer_sizes: Sequence[int],
        num_tasks: int,
        mixture_out: int,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.mixture = mixture
        self.towers = nn.ModuleList(OverArch(mixture_out, [*tower_layer_sizes, 1]) for _ in range(num_tasks))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense [B, ...] and the ids -> outputs [B, T]."""
        embeddings = self.embedding_bag_collection(sparse_features).values()
        vectors = self.mixture(torch.cat([dense_features, embeddings], dim=1))
        return torch.cat([tower(each) for tower, each in zip(self.towers, vectors, strict=True)], dim=1)


def _mixed(scores_BE: Tensor, experts: list[Tensor]) -> Tensor:
    """The experts' vectors, weighted by the softmax of the scores: [B, H]."""
    weights_BE = torch.softmax(scores_BE, dim=1)
    return torch.einsum("be,beh->bh", weights_BE, torch.stack(experts, dim=1))
