"""HSTU: gated attention over jagged histories, with a pointwise SiLU instead of a softmax."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.modules.linear import Linear
from meshrec.ops.attention import Bias, Mask, jagged_attention

# A sample is a user's history: a sequence of tokens, with the targets to score as the last tokens. Tokens
# whose keys and values are in the KV cache are *cached*, all others are *new*.
#
# Shape legend: N tokens of all samples, M new tokens, K cached tokens, B samples, E token width, S width of
# keys and values of all heads, H heads, P relative positions, T time buckets.


class Tokens(NamedTuple):
    """Layout of a batch of token sequences: where every sample starts, and which tokens are new.

    The keys and values of *cached* tokens are in the KV cache. All other tokens are *new*. A batch has B
    samples with N tokens in total: K cached and M new tokens.
    """

    offsets_B1: Tensor
    """Index of every sample's first token, followed by N; int64 [B + 1]."""
    timestamps_N: Tensor | None = None
    """Token times in seconds, int64."""
    num_targets_B: Tensor | None = None
    """Number of targets, which are the last tokens of a sample, int64 [B]; None: there are none."""
    new_offsets_B1: Tensor | None = None
    """Index of every sample's first new token, counted among new tokens only, followed by M; int64 [B + 1].

    New tokens are the last tokens of a sample. None: all tokens are new.
    """
    order_N: Tensor | None = None
    """For every token in sample order, the index in the concatenation of all cached tokens and all new
    tokens; int64 [N].

    None: the concatenation is in sample order already, as for a single sample.
    """

    @staticmethod
    def after(cached_B: Tensor, new_B: Tensor) -> "Tokens":
        """Create the layout for samples in which new tokens follow cached tokens.

        Args:
            cached_B: Cached tokens in every sample, integers [B].
            new_B: New tokens in every sample, integers [B].
        """
        cached_B, new_B = cached_B.long(), new_B.long()
        # A single sample needs no reordering, so serving avoids the index_select below.
        if cached_B.shape[0] == 1:
            ends = torch.cat([new_B.new_zeros(1), cached_B + new_B])
            return Tokens(ends, new_offsets_B1=torch.cat([new_B.new_zeros(1), new_B]))
        # Running sums: how many cached (new) tokens are in the samples before.
        cached_B1, new_B1 = (
            torch.nn.functional.pad(counts.cumsum(0), (1, 0)) for counts in (cached_B, new_B)
        )
        offsets_B1 = cached_B1 + new_B1
        # On a GPU this waits for the device, because the host does not know the number of tokens.
        sample_N = torch.repeat_interleave(
            torch.arange(len(cached_B), device=cached_B.device), cached_B + new_B
        )
        position_N = torch.arange(len(sample_N), device=cached_B.device) - offsets_B1[sample_N]
        # Cached tokens come first within a sample.
        is_new_N = position_N >= cached_B[sample_N]
        # In the concatenation, new tokens follow all cached tokens.
        new_N = cached_B1[-1] + new_B1[sample_N] + position_N - cached_B[sample_N]
        order_N = torch.where(is_new_N, new_N, cached_B1[sample_N] + position_N)
        return Tokens(offsets_B1, new_offsets_B1=new_B1, order_N=order_N)

    def in_order(self, cached: Tensor, new: Tensor, *, dim: int = 0) -> Tensor:
        """Merge values for cached tokens and for new tokens into a tensor in sample order.

        Args:
            cached: Values for the K cached tokens along ``dim``.
            new: Values for the M new tokens along ``dim``.
            dim: Token dimension.

        Returns:
            Values for all N tokens along ``dim``.
        """
        both = torch.cat([cached, new], dim)
        return both if self.order_N is None else both.index_select(dim, self.order_N)

    def extend_cache(self, cached: Tensor, num_new: int) -> Tensor:
        """Return the cached keys and values, with uninitialized entries for new tokens, which layers then
        fill.

        Args:
            cached: Keys and values for cached tokens, [layers, K, S] with S = ``HSTUBlock.cache_width``.
            num_new: New token count M.

        Returns:
            [layers, N, S], in sample order.
        """
        num_layers, _, width = cached.shape
        return self.in_order(cached, cached.new_empty(num_layers, num_new, width), dim=1)


class HSTUBlock(nn.Module):
    """An HSTU layer: ``y = x + dropout(W (norm(A v) * u))``, where ``A = SiLU(alpha q k^T + bias) / L``.

    A linear map and a SiLU compute u, v, q and k per token; ``alpha`` is ``1 / sqrt(attention_dim)``, and
    ``L`` is ``max_length``. Source: Zhai et al., "Actions speak louder than words: trillion-parameter
    sequential transducers for generative recommendations" (2024), equations 1 to 3.

    Args:
        width: Token width E.
        max_length: Maximum token count per sample.
        num_heads: Attention heads H.
        attention_dim: Width for queries and keys per head.
        hidden_dim: Width for values and gates per head.
        position_bias: Whether to add a learned bias by token distance. Without it, the result for a target
            does not depend on its position among the targets.
        num_time_buckets: Number T of learned biases by time difference; 0: no time bias. See
            `ops.attention.time_buckets`.
        dropout: Dropout probability.
        mask: Which tokens each token attends to.
        device: Device for the parameters.

    Attributes:
        heads: The tuple (``num_heads``, ``hidden_dim``, ``attention_dim``).

    Raises:
        ValueError: A size is below 1, or ``num_time_buckets`` is negative.

    Example::

        >>> block = HSTUBlock(8, max_length=4, num_time_buckets=0)
        >>> block(torch.ones(3, 8), torch.tensor([0, 1, 3])).shape
        torch.Size([3, 8])
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
        # Arguments for the attention kernel, fixed for the layer.
        self._max_length, self._mask = max_length, mask
        self.norm = nn.LayerNorm(width, device=device)
        self.projections = Linear(
            width, 2 * num_heads * (hidden_dim + attention_dim), bias=False, device=device
        )
        self.attended_norm = nn.LayerNorm(num_heads * hidden_dim, device=device)
        self.output = Linear(num_heads * hidden_dim, width, device=device)
        self.drop = nn.Dropout(dropout)
        # Distances from -(max_length - 1) to max_length - 1.
        # The size is 0 without a position bias, for which ``_bias`` creates no parameter.
        self.position_bias = _bias((2 * max_length - 1) * position_bias, device)
        self.time_bias = _bias(num_time_buckets, device)

    @property
    def cache_width(self) -> int:
        """Width S of a token's keys and values together, over all heads, as stored in the KV cache."""
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
            tokens_NE: Tokens, sample by sample.
            offsets_B1: Index of every sample's first token, followed by N, int64 [B + 1].
            timestamps_N: Token times in seconds, int64; required for a time bias.
            num_targets_B: Number of targets, which are the last tokens of a sample, int64 [B].

        Raises:
            ValueError: A sample is longer than ``max_length``, or timestamps are missing.
        """
        return self._attend(tokens_NE, Tokens(offsets_B1, timestamps_N, num_targets_B), None)

    def extend(self, tokens_ME: Tensor, all_NS: Tensor, new_at: slice | Tensor, tokens: Tokens) -> Tensor:
        """Apply the layer to new tokens only, given cached keys and values of the tokens before them.

        Args:
            tokens_ME: New tokens, sample by sample, [M, E].
            all_NS: Keys and values for all tokens, [N, S] with S = `cache_width`. Entries for new tokens are
                written in place.
            new_at: New token positions among all N tokens.
            tokens: Layout for all tokens.

        Returns:
            Output for the new tokens, [M, E]. It equals `forward` on all tokens if no cached token attends to
            a new token.

        Raises:
            ValueError: A sample is longer than ``max_length``, or timestamps are missing.
        """
        return self._attend(tokens_ME, tokens, (all_NS, new_at))

    def _attend(
        self, tokens_ME: Tensor, tokens: Tokens, cache: tuple[Tensor, slice | Tensor] | None
    ) -> Tensor:
        """Apply the layer to ``tokens_ME``, with keys and values for all tokens, cached or new.

        Args:
            tokens_ME: Tokens, sample by sample, [M, E].
            tokens: Token layout.
            cache: Keys and values for all tokens, and the positions of ``tokens_ME`` among them. None:
                ``tokens_ME`` are all tokens.
        """
        num_heads, hidden_dim, attention_dim = self.heads
        # Column layout of the projection: gate, value, query, key.
        hidden, inner = num_heads * hidden_dim, num_heads * attention_dim
        mixed = nn.functional.silu(self.projections(self.norm(tokens_ME)))
        gate, value, query, key = mixed.split([hidden, hidden, inner, inner], dim=1)
        if cache is not None:
            all_NS, new_at = cache
            # Written before attention reads it: new tokens attend to each other and themselves.
            all_NS[new_at] = torch.cat([value, key], dim=1)
            value, key = all_NS.split([hidden, inner], dim=1)
        # The kernel computes in fp32, also under autocast.
        attended = jagged_attention(
            query.float().unflatten(1, (num_heads, attention_dim)),
            key.float().unflatten(1, (num_heads, attention_dim)),
            value.float().unflatten(1, (num_heads, hidden_dim)),
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
    """Create a bias parameter [size], normally distributed.

    Return None for size 0, because DDP waits for a gradient of every parameter, even of an empty one.
    """
    return nn.Parameter(nn.init.normal_(torch.empty(size, device=device), std=0.02)) if size else None


def cache_shape(blocks: nn.ModuleList) -> tuple[int, int]:
    """Return the KV cache size per token: layer count, and the width S for keys and values per layer."""
    block = blocks[0]
    assert isinstance(block, HSTUBlock)
    return len(blocks), block.cache_width


@torch.no_grad()
def extend_all(blocks: nn.ModuleList, tokens_ME: Tensor, all_LNS: Tensor, tokens: Tokens) -> Tensor:
    """Apply all layers to new tokens with a KV cache, without gradients; see `HSTUBlock.extend`.

    Args:
        blocks: Layers, `HSTUBlock`.
        tokens_ME: New tokens, sample by sample, [M, E].
        all_LNS: Keys and values for all tokens, cached and new, [layers, N, S] with S =
            ``HSTUBlock.cache_width``; see `Tokens.extend_cache`. Entries for new tokens are written in place.
        tokens: Token layout.

    Returns:
        Output of the last layer for the new tokens, [M, E].
    """
    num_cached, order_N = all_LNS.shape[1] - len(tokens_ME), tokens.order_N
    # Without reordering new tokens are a suffix, and a slice avoids an index copy per layer.
    new_at = slice(num_cached, None) if order_N is None else (order_N >= num_cached).nonzero()[:, 0]
    for block, all_NS in zip(blocks, all_LNS, strict=True):
        assert isinstance(block, HSTUBlock)
        tokens_ME = block.extend(tokens_ME, all_NS, new_at, tokens)
    return tokens_ME
