"""HSTU as a ranker: how likely is each candidate to be clicked, bought, ...? The model of MLPerf's DLRM-v3
and v4.

Architecture: Zhai et al., "Actions speak louder than words: trillion-parameter sequential transducers for
generative recommendations" (2024), and the public reference of the benchmark: the attributes of a user are
contextual tokens, each earlier item is a token that also knows what the user did, candidates are targets that
see the history and themselves only, and a small network reads the targets.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.models.hstu import KeptTokens
from meshrec.modules import EmbeddingCollection, HSTUBlock, Tokens, extend_all, kept_shape
from meshrec.ops.attention import Mask
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B samples, N items of all histories, M candidates of all samples, C contextual features, D width of rows, E
# width of tokens, S width of kept keys and values, L labels


class RankerFeatures(NamedTuple):
    """The features that `HSTURanker` reads."""

    contextual: tuple[str, ...]
    """Attributes of the user: one ID in every sample."""
    history: tuple[str, ...]
    """Descriptions of the items of the history, oldest first; all of one length."""
    candidates: tuple[str, ...]
    """Descriptions of the candidates, in the order and with the tables of ``history``. A sample may have
    several candidates."""
    actions: tuple[str, ...] = ()
    """Actions of the user on the items of the history."""
    times: str | None = None
    """The times of the history's items, and then of the candidates, in seconds. No table reads them."""


class _Most(NamedTuple):
    """The largest numbers of items in a history, and of candidates of a sample."""

    items: int
    candidates: int


class HSTURanker(nn.Module):
    """Model of logits for candidates, given a user's attributes and history.

    Args:
        embedding_collection: the tables of all features but the times.
        features: the names of the features.
        num_labels: the number L of labels.
        max_length: the largest number of items in a history.
        max_candidates: the largest number of candidates of a sample.
        width: the width E of tokens.
        num_blocks: the number of layers.
        num_heads, attention_dim, hidden_dim, dropout: see `HSTUBlock`. The widths are by default ``width``
            divided by ``num_heads``.
        device: device of everything but the tables.

    Raises:
        ValueError: a table of a feature is missing, or candidates and history do not fit each other.
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
        widths = _checked_widths(embedding_collection, features)
        self.embedding_collection = embedding_collection
        self.features, self._most = features, _Most(max_length, max_candidates)
        self._keys = [
            name for each in embedding_collection.embedding_configs() for name in each.feature_names
        ]
        self.contextual = nn.ModuleList(
            nn.Linear(widths[name], width, device=device) for name in features.contextual
        )
        self.content = nn.Linear(sum(widths[name] for name in features.history), width, device=device)
        self.action = nn.Linear(max(1, sum(widths[name] for name in features.actions)), width, device=device)
        self.positions = nn.Embedding(max_length, width, device=device)
        nn.init.normal_(self.positions.weight, std=0.02)
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
                position_bias=False,
                device=device,
            )
            for _ in range(num_blocks)
        )
        self.over = nn.Sequential(
            nn.LayerNorm(width, device=device),
            nn.Linear(width, width, device=device),
            nn.SiLU(),
            nn.Linear(width, num_labels, device=device),
        )

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the logits of each sample's last candidate, [B, L], and zeros for a sample without one;
        ``dense_features`` is ignored.
        """
        logits_ML = self.logits(sparse_features)
        after_B = sparse_features[self.features.candidates[0]].lengths().long()
        has_any = (after_B > 0).nonzero()[:, 0]
        last = (after_B.cumsum(0) - 1)[has_any]
        return logits_ML.new_zeros(len(after_B), logits_ML.shape[1]).index_copy(0, has_any, logits_ML[last])

    def logits(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the logits of all candidates, [M, L]."""
        found = self._look_up(sparse_features, self._keys)
        before_B = self._before(found)
        candidates, after_B = self._candidates(found)
        before = self._history(found, before_B)
        tokens = Tokens.after(before_B, after_B)._replace(
            timestamps_N=self._times(sparse_features, before_B, after_B), num_targets_B=after_B
        )
        is_candidate_N = tokens.in_order(before.new_zeros(len(before)), before.new_ones(len(candidates)))
        values = tokens.in_order(before, candidates)
        for block in self.blocks:
            values = block(values, tokens.offsets_B1, tokens.timestamps_N, tokens.num_targets_B)
        logits: Tensor = self.over(values[is_candidate_N.bool()])
        return logits

    def keep(self, sparse_features: KeyedJaggedTensor) -> KeptTokens:
        """Encode the users and their histories once, for `score`. No candidate is read."""
        names = [name for name in self._keys if name not in self.features.candidates]
        found = self._look_up(sparse_features, names)
        before_B = self._before(found)
        times = self._times(sparse_features, before_B, None)
        tokens = Tokens.after(torch.zeros_like(before_B), before_B)._replace(timestamps_N=times)
        values = self._history(found, before_B)
        every = values.new_empty(len(self.blocks), len(values), kept_shape(self.blocks)[1])
        extend_all(self.blocks, values, every, tokens)
        return KeptTokens(every, before_B)

    def score(self, sparse_features: KeyedJaggedTensor, kept: KeptTokens) -> Tensor:
        """Return the logits of all candidates, [M, L], for users who were encoded by `keep`.

        Equal to `logits`. All candidates of a user are scored together after the kept prefix (M-FALCON in
        the paper), so that the cost of a history does not grow with the number of candidates. Of the history,
        only times are read.
        """
        found = self._look_up(sparse_features, list(self.features.candidates))
        candidates, after_B = self._candidates(found)
        tokens = Tokens.after(kept.lengths_B, after_B)._replace(
            timestamps_N=self._times(sparse_features, kept.lengths_B, after_B), num_targets_B=after_B
        )
        every = tokens.joined(kept.rows, len(candidates))
        logits: Tensor = self.over(extend_all(self.blocks, candidates, every, tokens))
        return logits

    def _look_up(self, features: KeyedJaggedTensor, names: list[str]) -> dict[str, JaggedTensor]:
        """Look up the rows of some features; the other features of the tables get empty bags."""
        stride = features.stride()
        none = torch.zeros(stride, dtype=features.lengths().dtype, device=features.device())
        bags = {name: features[name] for name in names}
        wanted = KeyedJaggedTensor(
            self._keys,
            torch.cat([bags[name].values() for name in self._keys if name in bags]),
            lengths=torch.cat([bags[name].lengths() if name in bags else none for name in self._keys]),
            stride=stride,
        )
        found: dict[str, JaggedTensor] = self.embedding_collection(wanted)
        return found

    def _before(self, found: dict[str, JaggedTensor]) -> Tensor:
        """Check contextual features and histories, and return their number of tokens, [B].

        Raises:
            ValueError: a sample has no ID of a contextual feature, or several, or a history that is too long
                or whose features differ in length. A sample without a history may also lack contextual IDs:
                batches are filled up with such samples.
        """
        lengths_B = found[self.features.history[0]].lengths().long()
        context_B = torch.ones_like(lengths_B)
        if self.features.contextual:
            context_B = ((found[self.features.contextual[0]].lengths() > 0) | (lengths_B > 0)).long()
        expected = {
            **dict.fromkeys(self.features.contextual, context_B),
            **dict.fromkeys([*self.features.history, *self.features.actions], lengths_B),
        }
        _check_lengths(found, expected)
        if len(lengths_B) and int(lengths_B.max()) > self._most.items:
            raise ValueError(
                f"sample {int(lengths_B.argmax())} has a history of {int(lengths_B.max())} items, and "
                f"max_length is {self._most.items}. Cut histories where they are read, or raise max_length."
            )
        return lengths_B + context_B * len(self.features.contextual)

    def _history(self, found: dict[str, JaggedTensor], before_B: Tensor) -> Tensor:
        """Return the tokens of users and histories, sample by sample, [B C + N, E]. The places of items are
        counted from the end of the history.
        """
        contextual = [
            project(found[name].values())
            for project, name in zip(self.contextual, self.features.contextual, strict=True)
        ]
        items = self.content(torch.cat([found[name].values() for name in self.features.history], dim=1))
        if self.features.actions:
            items = items + self.action(
                torch.cat([found[name].values() for name in self.features.actions], dim=1)
            )
        lengths_B = found[self.features.history[0]].lengths().long()
        ends_N = torch.repeat_interleave(lengths_B.cumsum(0), lengths_B)
        items = items + self.positions(ends_N - 1 - torch.arange(len(items), device=items.device))
        users = torch.stack(contextual, dim=1).flatten(0, 1) if contextual else items[:0]
        tokens: Tensor = self.drop(Tokens.after(before_B - lengths_B, lengths_B).in_order(users, items))
        return tokens

    def _candidates(self, found: dict[str, JaggedTensor]) -> tuple[Tensor, Tensor]:
        """Return the tokens of the candidates, [M, E], and their number in each sample.

        Raises:
            ValueError: a sample has too many candidates, or their features differ in number.
        """
        after_B = found[self.features.candidates[0]].lengths().long()
        _check_lengths(found, dict.fromkeys(self.features.candidates, after_B))
        if len(after_B) and int(after_B.max()) > self._most.candidates:
            raise ValueError(
                f"sample {int(after_B.argmax())} has {int(after_B.max())} candidates, and max_candidates is "
                f"{self._most.candidates}. Give fewer, or raise max_candidates."
            )
        rows = torch.cat([found[name].values() for name in self.features.candidates], dim=1)
        tokens: Tensor = self.drop(self.content(rows) + self.target)
        return tokens, after_B

    def _times(self, features: KeyedJaggedTensor, before_B: Tensor, after_B: Tensor | None) -> Tensor | None:
        """Return the times of all tokens. Contextual tokens have that of the first item of the history, or 0.

        Args:
            features: the features of a batch.
            before_B: the number of tokens of user and history.
            after_B: the number of candidates; None: those of the batch are left out.
        """
        if self.features.times is None:
            return None
        given = features[self.features.times]
        context_B = before_B.clamp(max=len(self.features.contextual))
        history_B, offsets = before_B - context_B, given.offsets().long()
        last_B = history_B if after_B is None else history_B + after_B
        too_few = given.lengths() < history_B if after_B is None else given.lengths() != last_B
        if bool(too_few.any()):
            sample = int(too_few.nonzero()[0])
            raise ValueError(
                f"sample {sample} has {int(given.lengths()[sample])} times in feature "
                f"{self.features.times!r}, a history of {int(history_B[sample])} items and "
                f"{int(last_B[sample] - history_B[sample])} candidates. Give each its time, candidates last."
            )
        all_B, samples = last_B + context_B, torch.arange(len(last_B), device=last_B.device)
        sample_N = torch.repeat_interleave(samples, all_B)
        place_N = torch.arange(len(sample_N), device=last_B.device)
        place_N = place_N - (all_B.cumsum(0) - last_B)[sample_N]  # of the first item: 0
        at_N = offsets[sample_N] + place_N.clamp(min=0)
        values = torch.cat([given.values().long(), offsets.new_zeros(1)])
        has_time = (place_N >= 0) | (history_B[sample_N] > 0)
        return torch.where(has_time, values[at_N.clamp(max=len(values) - 1)], 0)


def _checked_widths(embedding_collection: EmbeddingCollection, features: RankerFeatures) -> dict[str, int]:
    """Check that tables and features fit each other, and return the widths of the rows of each feature."""
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


def _check_lengths(found: dict[str, JaggedTensor], expected: dict[str, Tensor]) -> None:
    for name, lengths_B in expected.items():
        given = found[name].lengths()
        if not torch.equal(given.to(lengths_B.dtype), lengths_B):
            sample = int((given != lengths_B).nonzero()[0])
            raise ValueError(
                f"sample {sample} has {int(given[sample])} IDs in feature {name!r}, which must have "
                f"{int(lengths_B[sample])}: one for a user's attribute, and otherwise one for each item. "
                "Give an ID for what is unknown."
            )
