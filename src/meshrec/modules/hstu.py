"""HSTU: gated attention over jagged histories, with a pointwise SiLU in place of a softmax."""

import math

import torch
from torch import Tensor, nn

from meshrec.ops.attention import Bias, Mask, silu_attention

# N tokens of all samples, B samples, E width of a token, H heads, P relative positions, T time buckets


class HSTUBlock(nn.Module):
    """One HSTU layer: ``y = x + dropout(W (norm(A v) * u))``, where ``A = SiLU(alpha q k^T + bias) / L``.

    One linear map and a SiLU give u, v, q and k of each token; ``alpha`` is ``1 / sqrt(attention_dim)``, and
    ``L`` is ``max_length``. Source: Zhai et al., "Actions speak louder than words: trillion-parameter
    sequential transducers for generative recommendations" (2024), equations 1 to 3.

    Args:
        width: the width E of a token.
        max_length: the largest number of tokens of a sample.
        num_heads: the number of attention heads H.
        attention_dim: the width of a head's queries and keys.
        hidden_dim: the width of a head's values and of its gate.
        num_time_buckets: the entries T of the time bias; 0: no time bias. See `ops.attention.time_buckets`.
        dropout: the share of values that are dropped in training.
        mask: which tokens a token attends to.
        device: the device of the parameters.

    Raises:
        ValueError: a size is below 1, or ``num_time_buckets`` is negative.
    """

    def __init__(
        self,
        width: int,
        *,
        max_length: int,
        num_heads: int = 1,
        attention_dim: int = 32,
        hidden_dim: int = 32,
        num_time_buckets: int = 129,
        dropout: float = 0.2,
        mask: Mask = Mask(),  # noqa: B008 - immutable
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        sizes = (width, max_length, num_heads, attention_dim, hidden_dim)
        if min(sizes) < 1 or num_time_buckets < 0:
            raise ValueError(
                f"width, max_length, num_heads, attention_dim and hidden_dim {sizes} must be at least 1, and "
                f"num_time_buckets {num_time_buckets} at least 0."
            )
        self._heads = (num_heads, hidden_dim, attention_dim)
        self._max_length, self._mask = max_length, mask
        self.norm = nn.LayerNorm(width, device=device)
        self.projections = nn.Linear(
            width, 2 * num_heads * (hidden_dim + attention_dim), bias=False, device=device
        )
        self.attended_norm = nn.LayerNorm(num_heads * hidden_dim, device=device)
        self.output = nn.Linear(num_heads * hidden_dim, width, device=device)
        self.drop = nn.Dropout(dropout)
        self.position_bias = nn.Parameter(torch.empty(2 * max_length - 1, device=device))
        self.time_bias = nn.Parameter(torch.empty(num_time_buckets, device=device))
        for bias in (self.position_bias, self.time_bias):
            nn.init.normal_(bias, std=0.02)

    def forward(
        self,
        tokens_NE: Tensor,
        offsets_B1: Tensor,
        timestamps_N: Tensor | None = None,
        num_targets_B: Tensor | None = None,
    ) -> Tensor:
        """Map the tokens of all samples, [N, E], to [N, E].

        Args:
            tokens_NE: the tokens, sample by sample.
            offsets_B1: where each sample begins, and N; int64 [B + 1].
            timestamps_N: the times of the tokens in seconds, int64; needed if there is a time bias.
            num_targets_B: the number of targets at the end of each sample, int64 [B]; None: no targets.

        Raises:
            ValueError: a sample is longer than ``max_length``, or timestamps are missing.
        """
        num_heads, hidden_dim, attention_dim = self._heads
        mixed = nn.functional.silu(self.projections(self.norm(tokens_NE)))
        hidden, inner = num_heads * hidden_dim, num_heads * attention_dim
        gate, value, query, key = mixed.split([hidden, hidden, inner, inner], dim=1)
        attended = silu_attention(
            query.unflatten(1, (num_heads, attention_dim)),
            key.unflatten(1, (num_heads, attention_dim)),
            value.unflatten(1, (num_heads, hidden_dim)),
            offsets_B1,
            max_length=self._max_length,
            scale=1 / math.sqrt(attention_dim),
            mask=self._mask,
            bias=Bias(self.position_bias, self.time_bias if len(self.time_bias) else None, timestamps_N),
            num_targets_B=num_targets_B,
        )
        out: Tensor = tokens_NE + self.drop(self.output(self.attended_norm(attended.flatten(1)) * gate))
        return out
