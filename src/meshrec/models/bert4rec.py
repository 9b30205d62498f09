"""BERT4Rec: bidirectional self-attention over a user's items that fills in hidden ones.

Sun et al., "BERT4Rec: sequential recommendation with bidirectional encoder representations from transformer"
(2019). The next item is one more hidden item at the end, in training as in evaluation; the paper hides it in
some samples only. Loss: a sampled softmax, see `meshrec.models.sasrec`.
"""

import torch
from torch import Tensor, nn
from typing_extensions import override

from meshrec.models.attention_block import AttentionBlock, check_heads
from meshrec.models.history_model import HistoryFeatures, HistoryModel, ItemCatalogue
from meshrec.models.next_item import SampledSoftmax
from meshrec.modules import EmbeddingCollection


class BERT4Rec(HistoryModel):
    """Next-item model of bidirectional self-attention, trained to predict hidden items.

    Positions are counted from the end of a history.

    Args:
        embedding_collection, features, max_length, softmax, items, device: see `HistoryModel`.
        num_blocks: the number of blocks, whose MLPs are four times as wide as the table.
        num_heads, dropout: see `AttentionBlock`.
        hidden: the share of a history's items that training hides.

    Raises:
        ValueError: the two features do not share exactly one table, or the sizes do not fit.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        features: HistoryFeatures,
        *,
        max_length: int = 50,
        num_blocks: int = 2,
        num_heads: int = 2,
        dropout: float = 0.2,
        hidden: float = 0.2,
        softmax: SampledSoftmax = SampledSoftmax(),  # noqa: B008 - immutable
        items: ItemCatalogue | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_collection,
            features,
            max_length=max_length,
            softmax=softmax,
            items=items,
            hidden=hidden,
            device=device,
        )
        check_heads(self.width, num_heads, num_blocks)
        self.positions = nn.Embedding(max_length + 1, self.width, device=device)
        for table in (self.positions.weight, self.start):
            nn.init.normal_(table, std=0.02)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            AttentionBlock(
                self.width, num_heads, dropout, hidden=4 * self.width, activation=nn.GELU, device=device
            )
            for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(self.width, device=device)

    @override
    def _encode_bucket(self, lengths: Tensor, rows: Tensor) -> Tensor:
        whole = torch.cat([rows, rows.new_zeros(lengths.shape[0], 1, self.width)], dim=1)
        from_end = lengths[:, None] - torch.arange(whole.shape[1], device=lengths.device)
        whole = torch.where((from_end == 0)[:, :, None], self.start, whole)
        whole = self.drop(whole + self.positions(from_end.clamp(min=0)))
        for block in self.blocks:
            whole = block(whole, from_end >= 0)
        encoded: Tensor = self.norm(whole)
        return encoded
