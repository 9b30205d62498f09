"""Models for several labels: a shared bottom, or experts that each task mixes with its own gate.

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
    """The part of a multi-task model that turns one shared input into a vector for each task."""

    @abstractmethod
    def forward(self, shared_BI: Tensor) -> list[Tensor]:
        """Map the shared input [B, I] to a list of T vectors [B, H]."""


class SharedBottom(Mixture):
    """One MLP whose output all tasks share.

    Args:
        in_features: number of input columns I.
        layer_sizes: layer sizes of the MLP; the last size is H.
        num_tasks: number of tasks T.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], num_tasks: int) -> None:
        super().__init__()
        self.bottom = MLP(in_features, layer_sizes)
        self._num_tasks = num_tasks

    def forward(self, shared_BI: Tensor) -> list[Tensor]:
        return [self.bottom(shared_BI)] * self._num_tasks


class MMoE(Mixture):
    """Multi-gate mixture of experts: each task mixes all experts with the softmax of its own gate.

    Args:
        in_features: number of input columns I.
        layer_sizes: layer sizes of each expert; the last size is H.
        num_tasks: number of tasks T.
        num_experts: number of experts E.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], num_tasks: int, num_experts: int = 4
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MLP(in_features, layer_sizes) for _ in range(num_experts))
        self.gates = nn.ModuleList(nn.Linear(in_features, num_experts) for _ in range(num_tasks))

    def forward(self, shared_BI: Tensor) -> list[Tensor]:
        experts = [expert(shared_BI) for expert in self.experts]
        return [_mixed(gate(shared_BI), experts) for gate in self.gates]


class PLE(Mixture):
    """Progressive layered extraction: layers of shared experts and of experts that belong to one task.

    Each task mixes the shared experts with its own.

    Args:
        in_features: number of input columns I.
        layer_sizes: layer sizes of each expert in each layer; the last size is H.
        num_tasks: number of tasks T.
        num_shared: number of shared experts in each layer.
        num_own: number of experts that each task owns in each layer.
        num_layers: number of layers. Between two layers the shared vector mixes all experts.
    """

    def __init__(
        self,
        in_features: int,
        layer_sizes: Sequence[int],
        num_tasks: int,
        *,
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
        vectors = [shared_BI] * (self._num_tasks + 1)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors[: self._num_tasks]


class _Extraction(nn.Module):
    """One layer of PLE. Its vectors are those of all tasks, followed by the shared one."""

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
    """Multi-task model: embeddings and dense values, a mixture, and a tower for each task.

    Args:
        embedding_bag_collection: the tables; their widths may differ.
        mixture: maps all embedding and dense columns to H columns for each task.
        tower_layer_sizes: hidden layers of each task's tower.
        num_tasks: number of tasks T.
        mixture_out: number of columns H that the mixture gives each task.
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
        """Return outputs [B, T] for dense values [B, columns] and the IDs."""
        embeddings = self.embedding_bag_collection(sparse_features).values()
        vectors = self.mixture(torch.cat([dense_features, embeddings], dim=1))
        return torch.cat([tower(each) for tower, each in zip(self.towers, vectors, strict=True)], dim=1)


def _mixed(scores_BE: Tensor, experts: list[Tensor]) -> Tensor:
    """Mix the experts' vectors with the softmax of the scores; returns [B, H]."""
    weights_BE = torch.softmax(scores_BE, dim=1)
    return torch.einsum("be,beh->bh", weights_BE, torch.stack(experts, dim=1))
