"""HSTU as a ranker: scores candidate items for a user, as the models DLRM-v3 and v4 in MLPerf do.

The architecture is from Zhai et al., "Actions speak louder than words: trillion-parameter sequential
transducers for generative recommendations" (2024), and from the public MLPerf reference. A sample is a
sequence of tokens: first a token per user attribute (contextual tokens), then a token per history item, which
includes the user's action, then a token per candidate. A candidate attends to itself and to the tokens before
the candidates, but not to other candidates. A small MLP maps the encoded candidates to logits.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.models.hstu import TokenCache
from meshrec.modules import EmbeddingCollection, HSTUBlock, Tokens, cache_shape, extend_all
from meshrec.modules.linear import Linear, LogitLinear
from meshrec.ops.attention import Mask
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B samples, N items of all histories, M candidates of all samples, C contextual features, D row width,
# E token width, S width of cached keys and values, L labels


class RankerFeatures(NamedTuple):
    """Feature names for `HSTURanker`."""

    contextual: tuple[str, ...]
    """Features with a user attribute, such as the country: a single ID per sample."""
    history: tuple[str, ...]
    """Features with an attribute of the history items, such as item ID or category, oldest item first. All
    have an ID per history item."""
    candidates: tuple[str, ...]
    """Features with an attribute of the candidates: the same attributes in the same order as ``history``,
    with the same tables. All have an ID per candidate, and a sample may have several candidates."""
    actions: tuple[str, ...] = ()
    """Features with the user's action on the history items, such as a click: an ID per history item."""
    times: str | None = None
    """Feature with a timestamp per history item, then per candidate, in seconds, which is not looked up in a
    table. None: the model does not read timestamps."""


class HSTURanker(nn.Module):
    """Model that computes logits for candidate items, given a user's attributes and history.

    Args:
        embedding_collection: Tables for all features except ``times``.
        features: Feature names.
        num_labels: Logits per candidate, L, such as a click and a purchase.
        max_length: Maximum history length, in items.
        max_candidates: Maximum candidates per sample.
        width: Token width E.
        num_blocks: Number of layers.
        num_heads: Attention heads per layer.
        attention_dim: Width of queries and keys per head; None: ``width / num_heads``.
        hidden_dim: Width of values and gates per head; None: ``width / num_heads``.
        dropout: Dropout probability.
        device: Device for everything except the tables.

    Raises:
        ValueError: A feature has no table, or candidates and history do not match.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        features: RankerFeatures,
        *,
        num_labels: int = 1,
        max_length: int = 200,
        max_candidates: int = 1,
        width: int = 64,
        num_blocks: int = 3,
        num_heads: int = 4,
        attention_dim: int | None = None,
        hidden_dim: int | None = None,
        dropout: float = 0.1,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        widths = _feature_widths(embedding_collection, features)
        self.embedding_collection = embedding_collection
        self.features, self._max_length, self._max_candidates = features, max_length, max_candidates
        # All features of all tables: a lookup needs a bag for every one of them.
        self._keys = [
            name for config in embedding_collection.embedding_configs() for name in config.feature_names
        ]
        self.contextual = nn.ModuleList(
            Linear(widths[name], width, device=device) for name in features.contextual
        )
        self.content = Linear(sum(widths[name] for name in features.history), width, device=device)
        # At least one column: torch warns about layers without inputs.
        self.action = Linear(max(1, sum(widths[name] for name in features.actions)), width, device=device)
        self.positions = nn.Embedding(max_length, width, device=device)
        nn.init.normal_(self.positions.weight, std=0.02)
        # Marks candidate tokens: without it they would look like history items without an action.
        self.target = nn.Parameter(torch.zeros(width, device=device))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            HSTUBlock(
                width,
                max_length=len(features.contextual) + max_length + max_candidates,
                num_heads=num_heads,
                attention_dim=attention_dim or width // num_heads,
                hidden_dim=hidden_dim or width // num_heads,
                num_time_buckets=0 if features.times is None else 129,
                dropout=dropout,
                mask=Mask(num_contextual=len(features.contextual)),
                # Without a position bias, a candidate's logit does not depend on its position among the
                # candidates.
                position_bias=False,
                device=device,
            )
            for _ in range(num_blocks)
        )
        self.over = nn.Sequential(
            nn.LayerNorm(width, device=device),
            Linear(width, width, device=device),
            nn.SiLU(),
            LogitLinear(width, num_labels, device=device),
        )

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the logits for the last candidate in every sample, [B, L]; zeros without candidates.

        Args:
            dense_features: Ignored.
            sparse_features: IDs for all features, and times.
        """
        logits_ML = self.logits(sparse_features)
        targets_B = sparse_features[self.features.candidates[0]].lengths().long()
        # Samples without candidates keep zeros.
        nonempty = (targets_B > 0).nonzero()[:, 0]
        # Candidates are stored sample by sample.
        last = (targets_B.cumsum(0) - 1)[nonempty]
        return logits_ML.new_zeros(len(targets_B), logits_ML.shape[1]).index_copy(
            0, nonempty, logits_ML[last]
        )

    def logits(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the logits for all candidates, sample by sample, [M, L]."""
        rows_by_feature = self._look_up(sparse_features, self._keys)
        prefix_B = self._prefix_lengths(rows_by_feature)
        candidates, targets_B = self._candidate_tokens(rows_by_feature)
        prefix = self._prefix_tokens(rows_by_feature, prefix_B)
        tokens = Tokens.after(prefix_B, targets_B)._replace(
            timestamps_N=self._times(sparse_features, prefix_B, targets_B), num_targets_B=targets_B
        )
        is_candidate_N = tokens.in_order(prefix.new_zeros(len(prefix)), prefix.new_ones(len(candidates)))
        values = tokens.in_order(prefix, candidates)
        for block in self.blocks:
            values = block(values, tokens.offsets_B1, tokens.timestamps_N, tokens.num_targets_B)
        logits: Tensor = self.over(values[is_candidate_N.bool()])
        return logits

    def encode_prefix(self, sparse_features: KeyedJaggedTensor) -> TokenCache:
        """Encode user attributes and histories, and return a KV cache for `score`. Candidates are ignored."""
        names = [name for name in self._keys if name not in self.features.candidates]
        rows_by_feature = self._look_up(sparse_features, names)
        prefix_B = self._prefix_lengths(rows_by_feature)
        times = self._times(sparse_features, prefix_B, None)
        tokens = Tokens.after(torch.zeros_like(prefix_B), prefix_B)._replace(timestamps_N=times)
        values = self._prefix_tokens(rows_by_feature, prefix_B)
        all_LNS = values.new_empty(len(self.blocks), len(values), cache_shape(self.blocks)[1])
        extend_all(self.blocks, values, all_LNS, tokens)
        return TokenCache(all_LNS, prefix_B)

    def score(self, sparse_features: KeyedJaggedTensor, cache: TokenCache) -> Tensor:
        """Return the logits for all candidates, [M, L], with a KV cache for user attributes and history.

        The result equals `logits`, but a history is encoded only once for any number of candidates (M-FALCON
        in the paper).

        Args:
            sparse_features: Candidates, and timestamps for history items and candidates.
            cache: Result from `encode_prefix` for the same samples.
        """
        rows_by_feature = self._look_up(sparse_features, list(self.features.candidates))
        candidates, targets_B = self._candidate_tokens(rows_by_feature)
        tokens = Tokens.after(cache.lengths_B, targets_B)._replace(
            timestamps_N=self._times(sparse_features, cache.lengths_B, targets_B), num_targets_B=targets_B
        )
        all_LNS = tokens.extend_cache(cache.rows, len(candidates))
        logits: Tensor = self.over(extend_all(self.blocks, candidates, all_LNS, tokens))
        return logits

    def _look_up(self, features: KeyedJaggedTensor, names: list[str]) -> dict[str, JaggedTensor]:
        """Look up some features, and return the table rows by feature.

        A lookup needs all features that have a table, so other features get empty bags.
        """
        # Features that are not requested get empty bags, because a lookup needs all features of its tables.
        stride = features.stride()
        none = torch.zeros(stride, dtype=features.lengths().dtype, device=features.device())
        bags = {name: features[name] for name in names}
        requested = KeyedJaggedTensor(
            self._keys,
            torch.cat([bags[name].values() for name in self._keys if name in bags]),
            lengths=torch.cat([bags[name].lengths() if name in bags else none for name in self._keys]),
            stride=stride,
        )
        rows_by_feature: dict[str, JaggedTensor] = self.embedding_collection(requested)
        return rows_by_feature

    def _prefix_lengths(self, rows_by_feature: dict[str, JaggedTensor]) -> Tensor:
        """Check user attributes and histories, and return the number of tokens before the candidates, [B].

        A sample that pads the last batch has neither attributes nor a history, and so no tokens.
        """
        lengths_B = rows_by_feature[self.features.history[0]].lengths().long()
        context_B = torch.ones_like(lengths_B)
        if self.features.contextual:
            context_B = (
                (rows_by_feature[self.features.contextual[0]].lengths() > 0) | (lengths_B > 0)
            ).long()
        expected = {
            **dict.fromkeys(self.features.contextual, context_B),
            **dict.fromkeys([*self.features.history, *self.features.actions], lengths_B),
        }
        _check_lengths(rows_by_feature, expected)
        if len(lengths_B) and int(lengths_B.max()) > self._max_length:
            raise ValueError(
                f"sample {int(lengths_B.argmax())} has a history of {int(lengths_B.max())} items, and "
                f"max_length is {self._max_length}. Cut histories where they are read, or raise max_length."
            )
        return lengths_B + context_B * len(self.features.contextual)

    def _prefix_tokens(self, rows_by_feature: dict[str, JaggedTensor], prefix_B: Tensor) -> Tensor:
        """Return the input vectors for user attributes and history items by sample, [B * C + N, E]."""
        contextual = [
            project(rows_by_feature[name].values())
            for project, name in zip(self.contextual, self.features.contextual, strict=True)
        ]
        items = self.content(
            torch.cat([rows_by_feature[name].values() for name in self.features.history], dim=1)
        )
        if self.features.actions:
            items = items + self.action(
                torch.cat([rows_by_feature[name].values() for name in self.features.actions], dim=1)
            )
        lengths_B = rows_by_feature[self.features.history[0]].lengths().long()
        # Positions are counted from the end of the history, so that recent items share embeddings across
        # lengths.
        ends_N = torch.repeat_interleave(lengths_B.cumsum(0), lengths_B)
        items = items + self.positions(ends_N - 1 - torch.arange(len(items), device=items.device))
        # [B, C, E] -> [B C, E]
        users = torch.stack(contextual, dim=1).flatten(0, 1) if contextual else items[:0]
        tokens: Tensor = self.drop(Tokens.after(prefix_B - lengths_B, lengths_B).in_order(users, items))
        return tokens

    def _candidate_tokens(self, rows_by_feature: dict[str, JaggedTensor]) -> tuple[Tensor, Tensor]:
        """Return the input vectors for candidates, [M, E], and the number of candidates per sample, [B]."""
        targets_B = rows_by_feature[self.features.candidates[0]].lengths().long()
        _check_lengths(rows_by_feature, dict.fromkeys(self.features.candidates, targets_B))
        if len(targets_B) and int(targets_B.max()) > self._max_candidates:
            raise ValueError(
                f"sample {int(targets_B.argmax())} has {int(targets_B.max())} candidates, and max_candidates "
                f"is {self._max_candidates}. Give fewer, or raise max_candidates."
            )
        rows = torch.cat([rows_by_feature[name].values() for name in self.features.candidates], dim=1)
        tokens: Tensor = self.drop(self.content(rows) + self.target)
        return tokens, targets_B

    def _times(
        self, features: KeyedJaggedTensor, prefix_B: Tensor, targets_B: Tensor | None
    ) -> Tensor | None:
        """Return the timestamp per token in seconds, sample by sample; None without the feature ``times``.

        Contextual tokens have the timestamp of the first history item, or 0 without a history.

        Args:
            targets_B: Candidates per sample; None: timestamps only for the tokens before the candidates.
        """
        if self.features.times is None:
            return None
        times = features[self.features.times]
        context_B = prefix_B.clamp(max=len(self.features.contextual))
        history_B, offsets = prefix_B - context_B, times.offsets().long()
        last_B = history_B if targets_B is None else history_B + targets_B
        too_few = times.lengths() < history_B if targets_B is None else times.lengths() != last_B
        if bool(too_few.any()):
            sample = int(too_few.nonzero()[0])
            raise ValueError(
                f"sample {sample} has {int(times.lengths()[sample])} times in feature "
                f"{self.features.times!r}, a history of {int(history_B[sample])} items and "
                f"{int(last_B[sample] - history_B[sample])} candidates. Give each its time, candidates last."
            )
        all_B, samples = last_B + context_B, torch.arange(len(last_B), device=last_B.device)
        sample_N = torch.repeat_interleave(samples, all_B)
        position_N = torch.arange(len(sample_N), device=last_B.device)
        # Position within history and candidates; negative for contextual tokens.
        position_N = position_N - (all_B.cumsum(0) - last_B)[sample_N]
        index_N = offsets[sample_N] + position_N.clamp(min=0)
        # With one more value, an index is valid even if no sample has timestamps.
        values = torch.cat([times.values().long(), offsets.new_zeros(1)])
        has_time = (position_N >= 0) | (history_B[sample_N] > 0)
        return torch.where(has_time, values[index_N.clamp(max=len(values) - 1)], 0)


def _feature_widths(embedding_collection: EmbeddingCollection, features: RankerFeatures) -> dict[str, int]:
    """Check that all features have tables, and return the width of their table rows, by feature."""
    widths = {
        feature: config.embedding_dim
        for config in embedding_collection.embedding_configs()
        for feature in config.feature_names
    }
    read = [*features.contextual, *features.history, *features.candidates, *features.actions]
    missing = [name for name in read if name not in widths]
    of_items = [[widths.get(name) for name in names] for names in (features.history, features.candidates)]
    if missing or not features.history or of_items[0] != of_items[1]:
        raise ValueError(
            f"the tables lack the features {missing}; the history {list(features.history)} has rows of "
            f"widths {of_items[0]} and the candidates {list(features.candidates)} of {of_items[1]}. Give "
            "both the same tables in the same order, and at least one."
        )
    return widths


def _check_lengths(rows_by_feature: dict[str, JaggedTensor], expected: dict[str, Tensor]) -> None:
    """Raise ValueError if a sample has another number of IDs for a feature than expected."""
    for name, lengths_B in expected.items():
        given = rows_by_feature[name].lengths()
        if not torch.equal(given.to(lengths_B.dtype), lengths_B):
            sample = int((given != lengths_B).nonzero()[0])
            raise ValueError(
                f"sample {sample} has {int(given[sample])} IDs in feature {name!r}, which must have "
                f"{int(lengths_B[sample])}: one for a user's attribute, and otherwise one for each item. "
                "Give an ID for what is unknown."
            )
