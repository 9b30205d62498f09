"""Transformer block over padded histories, causal or bidirectional."""

import torch
from torch import Tensor, nn

# B samples, L positions, D embedding width


class AttentionBlock(nn.Module):
    """Transformer block: self-attention and an MLP, each with a layer norm and a residual connection.

    Args:
        width: the width D.
        num_heads: number of attention heads; must divide D.
        dropout: share of values dropped during training.
        hidden: width of the MLP's hidden layer; by default D.
        activation: class of the MLP's activation.
        device: device of the parameters.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        dropout: float,
        *,
        hidden: int | None = None,
        activation: type[nn.Module] = nn.ReLU,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._num_heads, self._dropout = num_heads, dropout
        self.attention_norm = nn.LayerNorm(width, device=device)
        self.projections = nn.Linear(width, 3 * width, device=device)
        self.output = nn.Linear(width, width, device=device)
        self.mlp_norm = nn.LayerNorm(width, device=device)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden or width, device=device),
            activation(),
            nn.Dropout(dropout),
            nn.Linear(hidden or width, width, device=device),
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, values_BLD: Tensor, keys_BL: Tensor | None = None) -> Tensor:
        """Map [B, L, D] to [B, L, D].

        Args:
            values_BLD: the values.
            keys_BL: the positions that every position attends to. None: a position attends to itself and to
                earlier positions.
        """
        heads = self.projections(self.attention_norm(values_BLD)).unflatten(-1, (3, self._num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if keys_BL is None else keys_BL[:, None, None, :],
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=keys_BL is None,
        )
        values_BLD = values_BLD + self.drop(self.output(attended.transpose(1, 2).flatten(2)))
        mixed: Tensor = values_BLD + self.drop(self.mlp(self.mlp_norm(values_BLD)))
        return mixed


def check_heads(width: int, num_heads: int, num_blocks: int) -> None:
    """Raise ValueError unless the heads divide the width and there is a block."""
    if num_heads < 1 or width % num_heads or num_blocks < 1:
        raise ValueError(
            f"num_heads {num_heads} must divide the table's width {width}, and num_blocks {num_blocks} must "
            "be at least 1."
        )
