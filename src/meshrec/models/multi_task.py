"""Multi-task models, which predict several labels: with a shared bottom, or with experts mixed per task.

See Ma et al.: "Modeling task relationships in multi-task learning with multi-gate mixture-of-experts" (2018),
and Tang et al.: "Progressive layered extraction (PLE): a novel multi-task learning model for personalized
recommendations" (2020). An expert is an MLP. A gate is a linear layer whose softmax weights the experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshrec.models.dlrm import OverArch
from meshrec.modules import MLP, EmbeddingBagCollection
from meshrec.modules.linear import Linear
from meshrec.sparse import KeyedJaggedTensor

# B batch, T tasks, E experts, I input columns, H hidden columns


class Mixture(nn.Module, ABC):
    """Base class for the middle of a multi-task model, which maps a shared input to a vector per task."""

    @abstractmethod
    def forward(self, shared_BI: Tensor) -> list[Tensor]:
        """Map the shared input [B, I] to T vectors [B, H]."""


class SharedBottom(Mixture):
    """Mixture in which all tasks get the same vector, from one MLP.

    Args:
        in_features: Input columns I.
        layer_sizes: Layer sizes in the MLP; the last is H.
        num_tasks: Tasks T.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], num_tasks: int) -> None:
        super().__init__()
        self.bottom = MLP(in_features, layer_sizes)
        self._num_tasks = num_tasks

    def forward(self, shared_BI: Tensor) -> list[Tensor]:
        # A single forward pass; all tasks get the same tensor.
        return [self.bottom(shared_BI)] * self._num_tasks


class MMoE(Mixture):
    """Multi-gate mixture of experts: all tasks share the experts, and every task mixes them with a gate.

    Args:
        in_features: Input columns I.
        layer_sizes: Layer sizes in every expert; the last is H.
        num_tasks: Tasks T.
        num_experts: Experts E.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], num_tasks: int, num_experts: int = 4
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MLP(in_features, layer_sizes) for _ in range(num_experts))
        self.gates = nn.ModuleList(Linear(in_features, num_experts) for _ in range(num_tasks))

    def forward(self, shared_BI: Tensor) -> list[Tensor]:
        experts = [expert(shared_BI) for expert in self.experts]
        return [_mix_experts(gate(shared_BI), experts) for gate in self.gates]


class PLE(Mixture):
    """Progressive layered extraction: several layers with shared experts and experts for a single task.

    In a layer, a task mixes the shared experts and the task's experts into the task's vector. A shared
    vector, which mixes all experts, is the input for the shared experts in the next layer.

    Args:
        in_features: Input columns I.
        layer_sizes: Layer sizes in every expert; the last is H.
        num_tasks: Tasks T.
        num_shared: Shared experts per layer.
        num_own: Experts per task and layer.
        num_layers: Layers.
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
        # Layers after the first read expert outputs.
        widths = [in_features] + [layer_sizes[-1]] * (num_layers - 1)
        self.layers = nn.ModuleList(
            _Extraction(width, layer_sizes, num_tasks, num_shared, num_own, is_last=number == num_layers - 1)
            for number, width in enumerate(widths)
        )
        self._num_tasks = num_tasks

    def forward(self, shared_BI: Tensor) -> list[Tensor]:
        # The first layer reads the same input for all tasks and as the shared vector.
        vectors = [shared_BI] * (self._num_tasks + 1)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors[: self._num_tasks]


class _Extraction(nn.Module):
    """Layer of `PLE`, with shared experts, experts per task, and gates that mix their outputs.

    The input is a list with T task vectors, [B, in_features] each, and then the shared vector. The output is
    such a list with vectors [B, H]. The last layer's output does not include the shared vector.
    """

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
            """Create ``num`` experts, which are MLPs."""
            return nn.ModuleList(MLP(in_features, layer_sizes) for _ in range(num))

        self.shared = experts(num_shared)
        self.own = nn.ModuleList(experts(num_own) for _ in range(num_tasks))
        self.gates = nn.ModuleList(Linear(in_features, num_own + num_shared) for _ in range(num_tasks))
        all_experts = num_tasks * num_own + num_shared
        # The last layer's shared vector would not be used.
        self.shared_gate = None if is_last else Linear(in_features, all_experts)

    def forward(self, vectors: list[Tensor]) -> list[Tensor]:
        *tasks, shared_input = vectors
        shared = [expert(shared_input) for expert in self.shared]
        task_outputs = [
            [expert(vector) for expert in experts]  # type: ignore[attr-defined]
            for vector, experts in zip(tasks, self.own, strict=True)
        ]
        mixed = [
            _mix_experts(gate(vector), [*task_experts, *shared])
            for gate, vector, task_experts in zip(self.gates, tasks, task_outputs, strict=True)
        ]
        if self.shared_gate is not None:
            mixed.append(
                _mix_experts(
                    self.shared_gate(shared_input),
                    [output for task_experts in task_outputs for output in task_experts] + shared,
                )
            )
        return mixed


class MultiTask(nn.Module):
    """Multi-task model: predicts a value per task from dense values and embeddings.

    A mixture maps dense values and embeddings to a vector per task. A tower per task, which is an MLP, maps
    this vector to the task's output.

    Args:
        embedding_bag_collection: Tables; their widths may differ.
        mixture: Module that maps the concatenated dense values and embeddings to T vectors.
        tower_layer_sizes: Hidden layer sizes in every tower.
        num_tasks: Tasks T.
        mixture_out: Width H of the vectors from ``mixture``.
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
        # A logit per task.
        self.towers = nn.ModuleList(OverArch(mixture_out, [*tower_layer_sizes, 1]) for _ in range(num_tasks))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the outputs of all towers, [B, T].

        Args:
            dense_features: Dense values, [B, columns].
            sparse_features: IDs for all features.
        """
        embeddings = self.embedding_bag_collection(sparse_features).values()
        vectors = self.mixture(torch.cat([dense_features, embeddings], dim=1))
        return torch.cat([tower(vector) for tower, vector in zip(self.towers, vectors, strict=True)], dim=1)


def _mix_experts(scores_BE: Tensor, experts: list[Tensor]) -> Tensor:
    """Return the mean expert output, weighted by the softmax of the scores, [B, H]."""
    weights_BE = torch.softmax(scores_BE, dim=1)
    return torch.einsum("be,beh->bh", weights_BE, torch.stack(experts, dim=1))
