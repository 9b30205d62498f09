"""GRU4Rec: next-item model with a recurrent network over the user's history.

See Hidasi et al., "Session-based recommendations with recurrent neural networks" (2016). The loss is a
sampled softmax, which Hidasi and Karatzoglou found better in "Recurrent neural networks with top-k gains for
session-based recommendations" (2018).
"""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from meshrec.models.history_model import HistoryFeatures, HistoryModel, HistoryOptions
from meshrec.modules import EmbeddingCollection
from meshrec.modules.linear import Linear


class GRU4Rec(HistoryModel):
    """Next-item model with gated recurrent units.

    Args:
        embedding_collection, features: As in `HistoryModel`.
        max_length: Maximum history length, in items.
        num_layers: Recurrent layers.
        hidden_dim: Width of the recurrent state; None: the embedding width.
        dropout: Dropout probability for item vectors and between layers.
        options: Further arguments for `HistoryModel`: ``softmax``, ``items`` and ``device``.

    Raises:
        ValueError: The two features do not share exactly one table, or a size is below 1.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        features: HistoryFeatures,
        *,
        max_length: int = 50,
        num_layers: int = 1,
        hidden_dim: int | None = None,
        dropout: float = 0.2,
        **options: Unpack[HistoryOptions],
    ) -> None:
        super().__init__(embedding_collection, features, max_length=max_length, **options)
        device = self.start.device
        hidden_dim = hidden_dim or self.width
        if min(num_layers, hidden_dim) < 1:
            raise ValueError(f"num_layers {num_layers} and hidden_dim {hidden_dim} must be at least 1.")
        self.drop = nn.Dropout(dropout)
        self.recurrent = nn.GRU(
            self.width,
            hidden_dim,
            num_layers,
            batch_first=True,
            # Dropout acts between layers. torch warns about it if there is only one.
            dropout=dropout if num_layers > 1 else 0.0,
            device=device,
        )
        # Back to embedding width, where scores are computed.
        self.output = Linear(hidden_dim, self.width, device=device)

    @override
    def _encode_bucket(self, lengths: Tensor, rows: Tensor) -> Tensor:
        # The start token predicts the first item.
        inputs = self.drop(torch.cat([self.start.expand(lengths.shape[0], 1, -1), rows], dim=1))
        # nn.GRU rejects an empty batch.
        states = (
            self.recurrent(inputs)[0] if lengths.shape[0] else inputs.new_zeros(0, 1, self.output.in_features)
        )
        encoded: Tensor = self.output(states)
        return encoded
