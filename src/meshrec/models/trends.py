"""Popularity trends as a term of all item scores."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from meshrec.models.settings import SelectedSettings

# I catalogue items, N item IDs


class TrendScores(SelectedSettings):
    """Term that is added to every item's score: the item's popularity trend, times a weight.

    The weight was selected before training.
    See [Note: new items] in ``data/item_trends.py``.

    Args:
        ids_I: All item IDs, ascending, int64.
        trends_I: Trend per item, float32.
        weight: Factor for the trends.
        device: Device for the trends.
    """

    constant_buffers = ("ids_I", "trends_I", "chosen")
    from_data = ("trends_I",)
    # Models of earlier releases have no trends.
    older_checkpoints: ClassVar[Mapping[str, float]] = {"trends_I": 0.0, "chosen": 0.0}
    ids_I: Tensor
    trends_I: Tensor  # persistent: a log that grows after training must not change a trained model

    def __init__(
        self, ids_I: Tensor, trends_I: Tensor, weight: float, *, device: torch.device | None = None
    ) -> None:
        super().__init__((weight,), device=device)
        self.register_buffer("ids_I", ids_I.to(device), persistent=False)
        self.register_buffer("trends_I", trends_I.to(device))

    def forward(self, ids_N: Tensor) -> Tensor:
        """Return the term per item ID, float32 [N]; undefined for IDs that are not in the catalog."""
        return self.trends_of(ids_N) * self.chosen

    def trends_of(self, ids_N: Tensor) -> Tensor:
        """Return the trend per item ID, without the weight; undefined for IDs that are not in the catalog."""
        return self.trends_I[torch.searchsorted(self.ids_I, ids_N).clamp(max=len(self.ids_I) - 1)]
