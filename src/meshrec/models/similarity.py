"""Similarities, which score item vectors for query vectors: dot products, cosines, or mixtures of cosines."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from meshrec.modules.linear import Linear

# T queries, N items, D vector width, Q query components, X item components, V width of a component

_QUERIES_PER_BLOCK = 256
"""Queries that a mixture scores at a time. It needs Q * X values per (query, item) pair."""


class Similarity(nn.Module, ABC):
    """Base class for functions that score an item vector for a query vector.

    Scoring has two steps, so that work per vector is done once: vectors are converted, and then converted
    vectors are scored, as in ``score_matrix(convert_queries(q), convert_items(i))``. Scores are divided by a
    temperature.
    """

    @abstractmethod
    def convert_queries(self, vectors_TD: Tensor) -> Tensor:
        """Convert query vectors [T, D] to inputs for `score_pairs` and `score_matrix`, [T, any width]."""

    @abstractmethod
    def convert_items(self, vectors_ND: Tensor) -> Tensor:
        """Convert item vectors [N, D] to inputs for `score_pairs` and `score_matrix`, [N, any width]."""

    @abstractmethod
    def score_pairs(self, queries: Tensor, items: Tensor) -> Tensor:
        """Return the score for the converted query t and the converted item t, for all t, [T]."""

    @abstractmethod
    def score_matrix(self, queries: Tensor, items: Tensor) -> Tensor:
        """Return the score for every converted query and every converted item, [T, N]."""

    def score_within_samples(self, queries_BPV: Tensor, items_BLV: Tensor) -> Tensor:
        """Return the score for every query and every item in the same sample, [B, P, L].

        Args:
            queries_BPV: P converted queries per sample, padded.
            items_BLV: L converted items per sample, padded.
        """
        pairs = zip(queries_BPV, items_BLV, strict=True)
        return torch.stack([self.score_matrix(queries, items) for queries, items in pairs])


class DotProduct(Similarity):
    """Dot product or cosine, divided by a temperature.

    Args:
        normalise: Whether to normalize vectors to length 1 first, which gives the cosine.
        temperature: Number by which scores are divided.
    """

    def __init__(self, *, normalise: bool = False, temperature: float = 1.0) -> None:
        super().__init__()
        self._normalise, self._temperature = normalise, temperature

    @property
    def options(self) -> tuple[bool, float]:
        """The arguments ``normalise`` and ``temperature``."""
        return self._normalise, self._temperature

    def convert_queries(self, vectors_TD: Tensor) -> Tensor:
        return nn.functional.normalize(vectors_TD, dim=1) if self._normalise else vectors_TD

    def convert_items(self, vectors_ND: Tensor) -> Tensor:
        return self.convert_queries(vectors_ND)

    def score_pairs(self, queries: Tensor, items: Tensor) -> Tensor:
        return (queries * items).sum(1) / self._temperature

    def score_matrix(self, queries: Tensor, items: Tensor) -> Tensor:
        scores = queries @ items.T
        # In place: a second matrix of this size costs more than the division.
        return scores if self._temperature == 1 else scores.div_(self._temperature)

    def score_within_samples(self, queries_BPV: Tensor, items_BLV: Tensor) -> Tensor:
        return queries_BPV @ items_BLV.mT / self._temperature


class MixtureOfLogits(Similarity):
    """Mixture of cosines: queries and items are split into components, whose cosines are averaged by a gate.

    A query has Q components and an item X components, computed by linear layers. The score is a weighted mean
    over the Q * X cosines. The weights are a softmax over the sum of three MLPs, which read the query, the
    item and the cosines. See Zhai et al., "Revisiting neural retrieval on accelerators" (2023), section 3.

    Args:
        width: Width D of queries and items.
        num_query: Components per query, Q.
        num_item: Components per item, X.
        component: Component width V.
        temperature: Number by which scores are divided.
        device: Device for parameters.
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
        self.query_components = Linear(width, num_query * component, device=device)
        self.item_components = Linear(width, num_item * component, device=device)
        self.query_gate, self.item_gate, self.pair_gate = (
            nn.Sequential(
                Linear(inputs, 2 * num_pairs, device=device),
                nn.SiLU(),
                Linear(2 * num_pairs, num_pairs, device=device),
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
        """Convert vectors to normalized components and gate values, concatenated in one tensor.

        Args:
            vectors: Queries or items, [T, D].

        Returns:
            Components and gate values, [T, num_components * V + Q * X].
        """
        parts = components(vectors).unflatten(1, (num_components, -1))
        return torch.cat([nn.functional.normalize(parts, dim=2).flatten(1), gate(vectors)], dim=1)

    def _unpack(self, packed: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Split the result from `_pack` into components and gate values.

        Args:
            side: 0 for queries, 1 for items.

        Returns:
            Components [T, num_components, V], and a gate value per component pair, [T, Q * X].
        """
        num_components, component = self._sizes[side], self._sizes[2]
        parts, gate = packed.tensor_split([num_components * component], dim=1)
        return parts.unflatten(1, (num_components, component)), gate

    # The pair gate depends on the cosines, so it cannot be precomputed in _pack.
    def _mix(self, cosines: Tensor, gate: Tensor) -> Tensor:
        """Return scores [...] from cosines [..., Q * X], and gate values with the same shape."""
        # ``gate`` is the sum of the query's gate and the item's gate.
        weights = torch.softmax(gate + self.pair_gate(cosines), dim=-1)
        return (weights * cosines).sum(-1) / self._temperature
