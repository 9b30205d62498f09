"""HSTU as a ranking model: synthetic data, model configuration, and the recipe ``hstu_ranker``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshrec.models import HSTURanker, RankerFeatures
from meshrec.modules import EmbeddingCollection, EmbeddingConfig
from meshrec.optim import Adam
from meshrec.train.architectures import initial_values
from meshrec.train.recipe import DataSource, DenseOptimizer, ModelConfig, Recipe, Training
from meshrec.train.schedule import Schedule

if TYPE_CHECKING:
    from meshrec.data import Dataset


@dataclass(frozen=True, kw_only=True)
class SyntheticImpressions(DataSource):
    """Synthetic impressions (shown items) in time order, with eleven tables and a known best possible AUC."""

    num_users: int = 1500
    """Number of users."""
    num_items: int = 1000
    """Number of items."""
    longest: int = 80
    """Maximum number of impressions per user."""
    history: int = 50
    """Maximum number of impressions in a history."""
    seed: int = 0
    """Seed for the generated users, items and clicks."""

    def load(self) -> "Dataset":
        """Generate the impressions."""
        from meshrec.data.synthetic_impressions import synthetic_impressions

        return synthetic_impressions(
            num_users=self.num_users,
            num_items=self.num_items,
            longest=self.longest,
            history=self.history,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class HSTURankerConfig(ModelConfig):
    """HSTU as a model that ranks candidate items for a user; see `meshrec.models.HSTURanker`.

    MLPerf's DLRM-v4 has ``embedding_dim=512, width=512, num_blocks=3, num_heads=4``.
    """

    embedding_dim: int = 32
    """Embedding width, the same for every table."""
    table_std: float | None = 0.02
    """Standard deviation for initial table values. None: small values whose size depends on the row count."""
    width: int = 64
    """Width of the tokens (vectors) between layers."""
    num_blocks: int = 3
    """Number of layers."""
    num_heads: int = 4
    """Number of attention heads, among which the width is divided."""
    times: bool = True
    """Whether the attention sees the time between items, if the data has times."""
    dropout: float = 0.1
    """Dropout rate in training."""
    max_candidates: int = 512
    """Maximum number of candidates per request."""

    @property
    def attention_width(self) -> int:
        return self.width

    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model, with tables on ``meta``.

        The form of a feature decides its role. A sequence describes the items in the history if it shares a
        table with a single-value feature, which then describes the candidate item. Other sequences describe
        the user's actions on the history items. All other features describe the user. Features without a
        table are not embedded.

        Raises:
            ValueError: no sequence shares a table with a feature, or the history length is unknown.
        """
        # Features without a table, such as times, are not embedded.
        read = [feature for feature in dataset.features if feature.num_embeddings]
        single = {feature.table or feature.name: feature.name for feature in read if not feature.sequence}
        sequences = [feature for feature in read if feature.sequence]
        history = [feature for feature in sequences if (feature.table or feature.name) in single]
        if not history or history[0].max_length is None:
            raise ValueError(
                f"dataset {dataset.name!r} must have a history: a sequence of known length that shares the "
                f"table of a feature of the item; its sequences are {[feature.name for feature in sequences]}"
                ". Set sequence, table and max_length of a Feature."
            )
        # The same order as `history`: a candidate's features must match those of history items.
        candidates = [single[feature.table or feature.name] for feature in history]
        features = RankerFeatures(
            contextual=tuple(name for name in single.values() if name not in candidates),
            history=tuple(feature.name for feature in history),
            candidates=tuple(candidates),
            actions=tuple(feature.name for feature in sequences if feature not in history),
            times=dataset.times if self.times else None,
        )
        tables = [
            EmbeddingConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                keys=table.keys,
                embedding_dim=self.embedding_dim,
                feature_names=list(table.feature_names),
                **initial_values(self.table_std, is_hashed=table.keys is not None),
            )
            for table in dataset.tables(self.embedding_dim)
        ]
        return HSTURanker(
            EmbeddingCollection(tables=tables, device=torch.device("meta")),
            features,
            num_labels=max(1, len(dataset.labels)),
            max_length=history[0].max_length,
            max_candidates=self.max_candidates,
            width=self.width,
            num_blocks=self.num_blocks,
            num_heads=self.num_heads,
            dropout=self.dropout,
        )


def hstu_ranker() -> Recipe:
    """Return a recipe for HSTU (like MLPerf's DLRM-v4) on impressions: will this user click this item?"""
    return Recipe(
        name="hstu_ranker",
        data=SyntheticImpressions(),
        model=HSTURankerConfig(),
        tables=Adam(lr=5e-3),
        dense=DenseOptimizer(kind="adam", lr=2e-3),
        schedule=Schedule(warmup_steps=20),
        training=Training(batch_size=64, evaluate_every=200, log_every=50),
    )
