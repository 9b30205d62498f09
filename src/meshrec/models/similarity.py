"""Item scores for encoded histories: dot products, cosines, or mixtures of cosines."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

# T queries, N items, D vector width, Q query components, X item components, V width of a component

_QUERIES_PER_BLOCK = 256
"""Queries per block of mixtures: a mixture needs Q X values per (query, item) pair."""


class Similarity(nn.Module, ABC):
    """Base class for item scores: functions of a query vector and an item vector, divided by a temperature.

    Vectors are converted once, then scored: ``score_matrix(convert_queries(q), convert_items(i))``.
    """

    @abstractmethod
    def convert_queries(self, vectors_TD: Tensor) -> Tensor:
        """Convert query vectors [T, D] to the input of `score_pairs` and `score_matrix`."""

    @abstractmethod
    def convert_items(self, vectors_ND: Tensor) -> Tensor:
        """Convert item vectors [N, D] to the input of `score_pairs` and `score_matrix`."""

    @abstractmethod
    def score_pairs(self, queries: Tensor, items: Tensor) -> Tensor:
        """Score converted query t with converted item t, for all t: [T]."""

    @abstractmethod
    def score_matrix(self, queries: Tensor, items: Tensor) -> Tensor:
        """Score every converted query with every converted item: [T, N]."""

    def score_within_samples(self, queries_BPV: Tensor, items_BLV: Tensor) -> Tensor:
        """Score all P queries of a sample with the sample's L items, for B samples: [B, P, L].

        Args:
            queries_BPV: Results of `convert_queries`, padded per sample.
            items_BLV: Results of `convert_items`, padded per sample.
        """
        pairs = zip(queries_BPV, items_BLV, strict=True)
        return torch.stack([self.score_matrix(queries, items) for queries, items in pairs])


class DotProduct(Similarity):
    """Dot product or cosine, divided by a temperature.

    Args:
        normalise: Normalize vectors to length 1 first.
        temperature: Divisor.
    """

    def __init__(self, *, normalise: bool = False, temperature: float = 1.0) -> None:
        super().__init__()
        self._normalise, self._temperature = normalise, temperature

    @property
    def options(self) -> tuple[bool, float]:
        """``normalise`` and ``temperature``."""
        return self._normalise, self._temperature

    def convert_queries(self, vectors_TD: Tensor) -> Tensor:
        return nn.functional.normalize(vectors_TD, dim=1) if self._normalise else vectors_TD

    def convert_items(self, vectors_ND: Tensor) -> Tensor:
        return self.convert_queries(vectors_ND)

    def score_pairs(self, queries: Tensor, items: Tensor) -> Tensor:
        return (queries * items).sum(1) / self._temperature

    def score_matrix(self, queries: Tensor, items: Tensor) -> Tensor:
        return queries @ items.T / self._temperature

    def score_within_samples(self, queries_BPV: Tensor, items_BLV: Tensor) -> Tensor:
        return queries_BPV @ items_BLV.mT / self._temperature


class MixtureOfLogits(Similarity):
    """A mixture of the cosines between Q query components and X item components.

    The Q X weights are a softmax over the sum of three gates, computed from the query, the item and the
    cosines. Source: Zhai et al., "Revisiting neural retrieval on accelerators" (2023), section 3.

    Args:
        width: Width D of queries and items.
        num_query: Query components Q.
        num_item: Item components X.
        component: Component width V.
        temperature: Cosine divisor.
        device: Parameter device.
    """

    def __init__(
        self,
        width: int,
        *,
        num_query: int = 4,
        num_item: int = 4,
        component: int = 32,
        temperature: float = 0.05,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._sizes, self._temperature = (num_query, num_item, component), temperature
        # One weight per (query component, item component) pair.
        num_pairs = num_query * num_item
        self.query_components = nn.Linear(width, num_query * component, device=device)
        self.item_components = nn.Linear(width, num_item * component, device=device)
        self.query_gate, self.item_gate, self.pair_gate = (
            nn.Sequential(
                nn.Linear(inputs, 2 * num_pairs, device=device),
                nn.SiLU(),
                nn.Linear(2 * num_pairs, num_pairs, device=device),
            )
            for inputs in (width, width, num_pairs)
        )

    def convert_queries(self, vectors_TD: Tensor) -> Tensor:
        return self._pack(vectors_TD, self.query_components, self._sizes[0], self.query_gate)

    def convert_items(self, vectors_ND: Tensor) -> Tensor:
        return self._pack(vectors_ND, self.item_components, self._sizes[1], self.item_gate)

    def score_pairs(self, queries: Tensor, items: Tensor) -> Tensor:
        (query, query_gate), (item, item_gate) = self._unpack(queries, 0), self._unpack(items, 1)
        cosines = torch.einsum("tqv,txv->tqx", query, item).flatten(1)
        return self._mix(cosines, query_gate + item_gate)

    def score_matrix(self, queries: Tensor, items: Tensor) -> Tensor:
        item, item_gate = self._unpack(items, 1)
        scores = []
        # Blocks bound the memory of the [block, N, Q, X] cosines.
        for block in queries.split(_QUERIES_PER_BLOCK):
            query, query_gate = self._unpack(block, 0)
            cosines = torch.einsum("tqv,nxv->tnqx", query, item).flatten(2)
            scores.append(self._mix(cosines, query_gate[:, None] + item_gate))
        return torch.cat(scores) if scores else queries.new_zeros(0, len(items))

    def _pack(self, vectors: Tensor, components: nn.Module, num_components: int, gate: nn.Module) -> Tensor:
        """Concatenate normalized components and the gate per vector.

        Args:
            vectors: [T, D].
            components: Linear layer to the components.
            num_components: Number of components.
            gate: Gate MLP.

        Returns:
            [T, components * V + Q X].
        """
        parts = components(vectors).unflatten(1, (num_components, -1))
        return torch.cat([nn.functional.normalize(parts, dim=2).flatten(1), gate(vectors)], dim=1)

    def _unpack(self, packed: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Split vectors packed by `_pack` into components and gate.

        Args:
            packed: [T, components * V + Q X].
            side: 0 for queries (Q components), 1 for items (X components).

        Returns:
            Components [T, components, V], and gate [T, Q X] with a value per component pair.
        """
        num_components, component = self._sizes[side], self._sizes[2]
        parts, gate = packed.tensor_split([num_components * component], dim=1)
        return parts.unflatten(1, (num_components, component)), gate

    # The pair gate depends on the cosines, so it cannot be precomputed in _pack.
    def _mix(self, cosines: Tensor, gate: Tensor) -> Tensor:
        """Return the weighted sum of cosines [..., Q X], divided by the temperature."""
        weights = torch.softmax(gate + self.pair_gate(cosines), dim=-1)
        return (weights * cosines).sum(-1) / self._temperature
