"""Transformer block over padded histories, causal or bidirectional."""

import torch
from torch import Tensor, nn

from meshrec.modules.linear import Linear

# B samples, L positions, D embedding width


class AttentionBlock(nn.Module):
    """Pre-norm transformer block: self-attention and an MLP, both with residual connections.

    Args:
        width: Embedding width D.
        num_heads: Attention heads; must divide D.
        dropout: Dropout probability.
        hidden: Hidden width in the MLP; None: D.
        activation: Activation class in the MLP.
        device: Device for the parameters.
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
        # Queries, keys and values in one matrix product.
        self.projections = Linear(width, 3 * width, device=device)
        self.output = Linear(width, width, device=device)
        # Pre-norm: residual connections bypass the norms, which trains stably without warmup.
        self.mlp_norm = nn.LayerNorm(width, device=device)
        self.mlp = nn.Sequential(
            Linear(width, hidden or width, device=device),
            activation(),
            nn.Dropout(dropout),
            Linear(hidden or width, width, device=device),
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, values_BLD: Tensor, keys_BL: Tensor | None = None) -> Tensor:
        """Apply attention, then the MLP; return vectors with the shape of the input, [B, L, D].

        Args:
            values_BLD: Input vectors.
            keys_BL: Bool mask for bidirectional attention: True for positions to attend to, False for
                padding. None: causal attention.
        """
        # [B, L, 3, H, D / H]
        heads = self.projections(self.attention_norm(values_BLD)).unflatten(-1, (3, self._num_heads, -1))
        # [B, H, L, D / H] each, as scaled_dot_product_attention expects.
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if keys_BL is None else keys_BL[:, None, None, :],
            # The functional form has no train/eval mode.
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=keys_BL is None,
        )
        values_BLD = values_BLD + self.drop(self.output(attended.transpose(1, 2).flatten(2)))
        mixed: Tensor = values_BLD + self.drop(self.mlp(self.mlp_norm(values_BLD)))
        return mixed


def check_heads(width: int, num_heads: int, num_blocks: int) -> None:
    """Check the sizes in a model with attention blocks.

    Args:
        width: Embedding width.
        num_heads: Attention heads per block.
        num_blocks: Number of blocks.

    Raises:
        ValueError: ``num_heads`` does not divide ``width``, or a number is below 1.
    """
    if num_heads < 1 or width % num_heads or num_blocks < 1:
        raise ValueError(
            f"num_heads {num_heads} must divide the table's width {width}, and num_blocks {num_blocks} must "
            "be at least 1."
        )
