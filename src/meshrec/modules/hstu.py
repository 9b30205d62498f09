"""HSTU: gated attention over jagged histories, with a pointwise SiLU in place of a softmax."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.ops.attention import Bias, Mask, jagged_attention

# N tokens of all samples, M new ones, K kept ones, B samples, E width of a token, S width of keys and values
# of all heads, H heads, P relative positions, T time buckets


class Tokens(NamedTuple):
    """The tokens of all samples: where they lie, and which of them are new."""

    offsets_B1: Tensor
    """The place where each sample begins, and N; int64 [B + 1]."""
    timestamps_N: Tensor | None = None
    """The times of the tokens in seconds, int64."""
    num_targets_B: Tensor | None = None
    """The number of targets at the end of each sample, int64 [B]; None: no targets."""
    new_offsets_B1: Tensor | None = None
    """The places where the new tokens of each sample begin among all new ones, and M. New tokens are the last
    ones of a sample. None: all tokens are new."""
    order_N: Tensor | None = None
    """The place of each token among the kept tokens of all samples, followed by the new ones. None: they are
    in order, as those of a single sample are.
    """

    @staticmethod
    def after(kept_B: Tensor, new_B: Tensor) -> "Tokens":
        """Return the places of samples that begin with kept tokens, by the numbers of kept and new ones."""
        kept_B, new_B = kept_B.long(), new_B.long()
        if kept_B.shape[0] == 1:
            ends = torch.cat([new_B.new_zeros(1), kept_B + new_B])
            return Tokens(ends, new_offsets_B1=torch.cat([new_B.new_zeros(1), new_B]))
        kept_B1, new_B1 = (torch.nn.functional.pad(each.cumsum(0), (1, 0)) for each in (kept_B, new_B))
        offsets_B1 = kept_B1 + new_B1
        sample_N = torch.repeat_interleave(torch.arange(len(kept_B), device=kept_B.device), kept_B + new_B)
        place_N = torch.arange(len(sample_N), device=kept_B.device) - offsets_B1[sample_N]
        is_new_N = place_N >= kept_B[sample_N]
        new_N = kept_B1[-1] + new_B1[sample_N] + place_N - kept_B[sample_N]
        order_N = torch.where(is_new_N, new_N, kept_B1[sample_N] + place_N)
        return Tokens(offsets_B1, new_offsets_B1=new_B1, order_N=order_N)

    def in_order(self, kept: Tensor, new: Tensor, *, dim: int = 0) -> Tensor:
        """Join what belongs to kept tokens and to new ones, sample by sample, along a dimension."""
        both = torch.cat([kept, new], dim)
        return both if self.order_N is None else both.index_select(dim, self.order_N)

    def joined(self, kept: Tensor, num_new: int) -> Tensor:
        """Return the keys and values of kept tokens [layers, K, S] with room for new ones, [layers, N, S]."""
        num_layers, _, width = kept.shape
        return self.in_order(kept, kept.new_empty(num_layers, num_new, width), dim=1)


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
        position_bias: whether there is a bias by the distance of two tokens. Without one, a target's result
            does not depend on its place among the targets.
        num_time_buckets: the entries T of the time bias; 0: no time bias. See `ops.attention.time_buckets`.
        dropout: the share of values that are dropped in training.
        mask: which tokens a token attends to.
        device: the device of the parameters.

    Attributes:
        heads: ``num_heads``, ``hidden_dim`` and ``attention_dim``.

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
        position_bias: bool = True,
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
        self.heads = (num_heads, hidden_dim, attention_dim)
        self._max_length, self._mask = max_length, mask
        self.norm = nn.LayerNorm(width, device=device)
        self.projections = nn.Linear(
            width, 2 * num_heads * (hidden_dim + attention_dim), bias=False, device=device
        )
        self.attended_norm = nn.LayerNorm(num_heads * hidden_dim, device=device)
        self.output = nn.Linear(num_heads * hidden_dim, width, device=device)
        self.drop = nn.Dropout(dropout)
        self.position_bias = _bias((2 * max_length - 1) * position_bias, device)
        self.time_bias = _bias(num_time_buckets, device)

    @property
    def kept_width(self) -> int:
        """The width S of a token's keys and values."""
        num_heads, hidden_dim, attention_dim = self.heads
        return num_heads * (hidden_dim + attention_dim)

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
            offsets_B1, timestamps_N, num_targets_B: see `Tokens`. A time bias needs timestamps.

        Raises:
            ValueError: a sample is longer than ``max_length``, or timestamps are missing.
        """
        return self._attend(tokens_NE, Tokens(offsets_B1, timestamps_N, num_targets_B), None)

    def extend(self, tokens_ME: Tensor, all_NS: Tensor, new_at: slice | Tensor, tokens: Tokens) -> Tensor:
        """Map new tokens of samples whose first tokens were mapped before.

        Args:
            tokens_ME: the new tokens, sample by sample.
            all_NS: the keys and values of all tokens. This method writes those of the new tokens.
            new_at: the places of the new tokens among all.
            tokens: where all of them lie.

        Returns: [M, E], which equals `forward` on all tokens if no kept token attends to a new one.

        Raises:
            ValueError: a sample is longer than ``max_length``, or timestamps are missing.
        """
        return self._attend(tokens_ME, tokens, (all_NS, new_at))

    def _attend(
        self, tokens_ME: Tensor, tokens: Tokens, extended: tuple[Tensor, slice | Tensor] | None
    ) -> Tensor:
        """Map tokens; ``extended``: the keys and values of all tokens, and the places of these; None: these
        are all.
        """
        num_heads, hidden_dim, attention_dim = self.heads
        hidden, inner = num_heads * hidden_dim, num_heads * attention_dim
        mixed = nn.functional.silu(self.projections(self.norm(tokens_ME)))
        gate, value, query, key = mixed.split([hidden, hidden, inner, inner], dim=1)
        if extended is not None:
            all_NS, new_at = extended
            all_NS[new_at] = torch.cat([value, key], dim=1)
            value, key = all_NS.split([hidden, inner], dim=1)
        attended = jagged_attention(
            query.unflatten(1, (num_heads, attention_dim)),
            key.unflatten(1, (num_heads, attention_dim)),
            value.unflatten(1, (num_heads, hidden_dim)),
            tokens.offsets_B1,
            max_length=self._max_length,
            scale=1 / math.sqrt(attention_dim),
            mask=self._mask,
            bias=Bias(self.position_bias, self.time_bias, tokens.timestamps_N),
            num_targets_B=tokens.num_targets_B,
            query_offsets_B1=tokens.new_offsets_B1,
        )
        out: Tensor = tokens_ME + self.drop(self.output(self.attended_norm(attended.flatten(1)) * gate))
        return out


def _bias(size: int, device: torch.device | None) -> nn.Parameter | None:
    """Return a bias; None for size 0: DDP waits for the gradient of every parameter."""
    return nn.Parameter(nn.init.normal_(torch.empty(size, device=device), std=0.02)) if size else None


def kept_shape(blocks: nn.ModuleList) -> tuple[int, int]:
    """Return the number of layers, and the width of a token's keys and values in one of them."""
    block = blocks[0]
    assert isinstance(block, HSTUBlock)
    return len(blocks), block.kept_width


@torch.no_grad()
def extend_all(blocks: nn.ModuleList, tokens_ME: Tensor, every: Tensor, tokens: Tokens) -> Tensor:
    """Map new tokens through layers, as `HSTUBlock.extend` does, without gradients.

    Args:
        blocks: the layers.
        tokens_ME: the new tokens, sample by sample.
        every: the keys and values of all tokens in all layers, [layers, N, S]. This function writes those of
            the new tokens.
        tokens: where all of them lie.

    Returns: [M, E].
    """
    num_kept, order_N = every.shape[1] - len(tokens_ME), tokens.order_N
    new_at = slice(num_kept, None) if order_N is None else (order_N >= num_kept).nonzero()[:, 0]
    for block, all_NS in zip(blocks, every, strict=True):
        assert isinstance(block, HSTUBlock)
        tokens_ME = block.extend(tokens_ME, all_NS, new_at, tokens)
    return tokens_ME
