"""Scores of items for encoded histories: dot products, cosines, or mixtures of several of them."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

# T queries, N items, D vector width, Q query components, X item components, V width of a component

_SLICE = 256
"""Number of queries whose mixtures are computed at a time: a mixture has Q X values for each pair."""


class Similarity(nn.Module, ABC):
    """A score for each pair of a query and an item, already divided by the temperature."""

    @abstractmethod
    def queries(self, vectors_TD: Tensor) -> Tensor:
        """Convert query vectors [T, D] to the form that `pairs` and `table` take."""

    @abstractmethod
    def items(self, vectors_ND: Tensor) -> Tensor:
        """Convert item vectors [N, D] to the form that `pairs` and `table` take."""

    @abstractmethod
    def pairs(self, queries: Tensor, items: Tensor) -> Tensor:
        """Return the scores [T] of prepared queries and as many prepared items."""

    @abstractmethod
    def table(self, queries: Tensor, items: Tensor) -> Tensor:
        """Return the scores [T, N] of all prepared queries and items."""


class DotProduct(Similarity):
    """The dot product of two vectors, or the cosine of their angle, divided by a temperature.

    Args:
        normalise: whether vectors are scaled to length 1 first.
        temperature: the divisor.
    """

    def __init__(self, *, normalise: bool = False, temperature: float = 1.0) -> None:
        super().__init__()
        self._normalise, self._temperature = normalise, temperature

    @property
    def options(self) -> tuple[bool, float]:
        """Whether vectors are scaled to length 1, and the divisor."""
        return self._normalise, self._temperature

    def queries(self, vectors_TD: Tensor) -> Tensor:
        return nn.functional.normalize(vectors_TD, dim=1) if self._normalise else vectors_TD

    def items(self, vectors_ND: Tensor) -> Tensor:
        return self.queries(vectors_ND)

    def pairs(self, queries: Tensor, items: Tensor) -> Tensor:
        return (queries * items).sum(1) / self._temperature

    def table(self, queries: Tensor, items: Tensor) -> Tensor:
        return queries @ items.T / self._temperature


class MixtureOfLogits(Similarity):
    """A mixture of the cosines between Q components of a query and X components of an item.

    The weights of the Q X cosines are a softmax over the sum of three gates: one computed from the query, one
    from the item, and one from the cosines. Source: Zhai et al., "Revisiting neural retrieval on
    accelerators" (2023), section 3.

    Args:
        width: the width D of queries and items.
        num_query: the number Q of components of a query.
        num_item: the number X of components of an item.
        component: the width V of a component.
        temperature: the divisor of the cosines.
        device: the device of the parameters.
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

    def queries(self, vectors_TD: Tensor) -> Tensor:
        return self._packed(vectors_TD, self.query_components, self._sizes[0], self.query_gate)

    def items(self, vectors_ND: Tensor) -> Tensor:
        return self._packed(vectors_ND, self.item_components, self._sizes[1], self.item_gate)

    def pairs(self, queries: Tensor, items: Tensor) -> Tensor:
        (query, query_gate), (item, item_gate) = self._parts(queries, 0), self._parts(items, 1)
        cosines = torch.einsum("tqv,txv->tqx", query, item).flatten(1)
        return self._mixed(cosines, query_gate + item_gate)

    def table(self, queries: Tensor, items: Tensor) -> Tensor:
        item, item_gate = self._parts(items, 1)
        found = []
        for some in queries.split(_SLICE):
            query, query_gate = self._parts(some, 0)
            cosines = torch.einsum("tqv,nxv->tnqx", query, item).flatten(2)
            found.append(self._mixed(cosines, query_gate[:, None] + item_gate))
        return torch.cat(found) if found else queries.new_zeros(0, len(items))

    def _packed(self, vectors: Tensor, components: nn.Module, number: int, gate: nn.Module) -> Tensor:
        """Return the components of each vector, followed by its gate."""
        parts = components(vectors).unflatten(1, (number, -1))
        return torch.cat([nn.functional.normalize(parts, dim=2).flatten(1), gate(vectors)], dim=1)

    def _parts(self, packed: Tensor, side: int) -> tuple[Tensor, Tensor]:
        number, component = self._sizes[side], self._sizes[2]
        parts, gate = packed.tensor_split([number * component], dim=1)
        return parts.unflatten(1, (number, component)), gate

    def _mixed(self, cosines: Tensor, gate: Tensor) -> Tensor:
        weights = torch.softmax(gate + self.pair_gate(cosines), dim=-1)
        return (weights * cosines).sum(-1) / self._temperature
