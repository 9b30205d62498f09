"""SASRec: self-attention over a user's items that predicts the next one.

Architecture: Kang, McAuley, "Self-attentive sequential recommendation" (2018), with its causal attention,
learned positions and shared item table. Loss: the paper compares each target with one other item; here every
position learns by a sampled softmax, after Klenitskiy, Vasilev, "Turning dross into gold loss: is BERT4Rec
really better than SASRec?" (2023).
"""

import torch
from torch import Tensor, nn
from typing_extensions import override

from meshrec.models.attention_block import AttentionBlock, check_heads
from meshrec.models.history_model import HistoryFeatures, HistoryModel, ItemCatalogue
from meshrec.models.next_item import SampledSoftmax
from meshrec.modules import EmbeddingCollection


class SASRec(HistoryModel):
    """Next-item model of causal self-attention.

    Histories of similar lengths are padded together, because torch's nested tensors have no causal attention
    on the CPU. The padding is at the end, where causal attention does not look. Positions are counted from
    the end of a history.

    Args:
        embedding_collection, features, max_length, softmax, items, device: see `HistoryModel`.
        num_blocks: the number of blocks.
        num_heads, dropout: see `AttentionBlock`.

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
        num_heads: int = 1,
        dropout: float = 0.2,
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
            device=device,
        )
        check_heads(self.width, num_heads, num_blocks)
        self.positions = nn.Embedding(max_length + 1, self.width, device=device)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(AttentionBlock(self.width, num_heads, dropout, device=device) for _ in range(num_blocks))
        )
        self.norm = nn.LayerNorm(self.width, device=device)

    @override
    def _encode_bucket(self, lengths: Tensor, rows: Tensor) -> Tensor:
        whole = torch.cat([self.start.expand(lengths.shape[0], 1, -1), rows], dim=1)
        from_end = lengths[:, None] - torch.arange(whole.shape[1], device=lengths.device)
        whole = self.drop(whole + self.positions(from_end.clamp(min=0)))
        encoded: Tensor = self.norm(self.blocks(whole))
        return encoded
