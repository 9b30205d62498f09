"""Model configurations for recipes. A configuration has the options of a model, and builds it for a dataset.

Input sizes, such as the number of features, come from the dataset.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from meshrec import models
from meshrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from meshrec.train.recipe import ModelConfig

if TYPE_CHECKING:
    from meshrec.data import Dataset

_logger = logging.getLogger("meshrec.train")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options for embedding tables, which all models below have."""

    embedding_dim: int = 16
    """Embedding width, the same for every table."""
    table_std: float | None = None
    """Standard deviation for initial table values. None: small values whose size depends on the row count."""


@dataclass(frozen=True, kw_only=True)
class DLRMConfig(TableOptions, ModelConfig):
    """DLRM: a bottom MLP over dense values, pairwise dot products with embeddings, and a top MLP.

    See `meshrec.models.DLRM`.
    """

    bottom: tuple[int, ...] = (64,)
    """Hidden layer sizes for the MLP over the dense values."""
    top: tuple[int, ...] = (64, 32)
    """Hidden layer sizes for the MLP over the dot products."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model, with tables on ``meta``."""
        return models.DLRM(
            tables_on_meta(dataset, self.embedding_dim, std=self.table_std),
            dataset.num_dense,
            [*self.bottom, self.embedding_dim],
            [*self.top, max(1, dataset.num_classes)],
        )


@dataclass(frozen=True, kw_only=True)
class DLRMDCNConfig(TableOptions, ModelConfig):
    """DLRM with a low-rank cross network (DCN-v2) instead of dot products; see `meshrec.models.DLRM_DCN`."""

    bottom: tuple[int, ...] = (64,)
    """Hidden layer sizes for the MLP over the dense values."""
    top: tuple[int, ...] = (64, 32)
    """Hidden layer sizes for the MLP over the cross network's output."""
    num_crosses: int = 2
    """Number of cross layers."""
    low_rank_dim: int = 32
    """Rank of the weight matrix in a cross layer."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model, with tables on ``meta``."""
        return models.DLRM_DCN(
            tables_on_meta(dataset, self.embedding_dim, std=self.table_std),
            dataset.num_dense,
            [*self.bottom, self.embedding_dim],
            [*self.top, max(1, dataset.num_classes)],
            self.num_crosses,
            self.low_rank_dim,
        )


@dataclass(frozen=True, kw_only=True)
class DeepFMConfig(TableOptions, ModelConfig):
    """DeepFM: pairwise products (a factorization machine) and an MLP over the same embeddings."""

    bottom: tuple[int, ...] = (64,)
    """Hidden layer sizes for the MLP over the dense values."""
    deep: tuple[int, ...] = (64, 32)
    """Hidden layer sizes for the MLP over all embeddings and the encoded dense values."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model, with tables on ``meta``."""
        return models.DeepFMModel(
            tables_on_meta(dataset, self.embedding_dim, std=self.table_std),
            dataset.num_dense,
            [*self.bottom, self.embedding_dim],
            [*self.deep, 1],
        )


@dataclass(frozen=True, kw_only=True)
class ClickTowersConfig(TableOptions, ModelConfig):
    """Two-tower model for click labels: the logit is the dot product of a query vector and an item vector.

    A tower is an MLP that computes a vector from features. The query tower also reads all dense values.
    `meshrec export --tower` exports a single tower.
    """

    item_features: tuple[str, ...] = ()
    """Features of the item tower; the query tower reads all others. If empty, the dataset's item feature."""
    layers: tuple[int, ...] = (64, 32)
    """Layer sizes in both towers. The last size is the vector width."""
    temperature: float = 0.1
    """Number by which dot products are divided."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model, with tables on ``meta``.

        Raises:
            ValueError: no feature belongs to the item.
        """
        # The item tower needs at least one feature.
        items = self.item_features or ((dataset.item,) if dataset.item is not None else ())
        if not items:
            raise ValueError(
                f"dataset {dataset.name!r} does not say which feature is the item's. Set model.item_features."
            )
        tables = tables_on_meta(dataset, self.embedding_dim, std=self.table_std)
        query = [feature.name for feature in dataset.features if feature.name not in items]
        towers = models.TwoTower(tables, query, items, self.layers, dense_in_features=dataset.num_dense)
        return models.TwoTowerClicks(towers, temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class MultiTaskConfig(TableOptions, ModelConfig):
    """Multi-task model: layers shared by all tasks, followed by a tower (MLP) per label."""

    mixture: Literal["shared_bottom", "mmoe", "ple"] = "mmoe"
    """Layers shared by the tasks. ``shared_bottom``: a single MLP. ``mmoe``: several MLPs (experts), weighted
    by a gate per task. ``ple``: shared experts, and additional experts per task.
    """
    expert: tuple[int, ...] = (64, 32)
    """Layer sizes of the shared bottom or of an expert."""
    num_experts: int = 4
    """Number of experts in ``mmoe``. ``ple`` has half as many shared experts, and as many again per task."""
    tower: tuple[int, ...] = (32,)
    """Hidden layer sizes of a task tower."""

    def __post_init__(self) -> None:
        if self.num_experts < 2:
            raise ValueError(f"model.num_experts is {self.num_experts}; it must be at least 2.")

    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model, with tables on ``meta``.

        Raises:
            ValueError: the dataset has only one label.
        """
        num_tasks = len(dataset.labels)
        if num_tasks < 2:
            raise ValueError(
                f"dataset {dataset.name!r} has one label, but this model needs several. Give Features more "
                "labels, or use another model."
            )
        tables = tables_on_meta(dataset, self.embedding_dim, std=self.table_std)
        # Input width of the experts: dense values, and one pooled embedding per feature.
        width = dataset.num_dense + self.embedding_dim * len(dataset.features)
        # PLE has half as many shared experts, and the same number for every task.
        half = self.num_experts // 2
        mixtures: dict[str, Callable[[], models.Mixture]] = {
            "shared_bottom": lambda: models.SharedBottom(width, self.expert, num_tasks),
            "mmoe": lambda: models.MMoE(width, self.expert, num_tasks, self.num_experts),
            "ple": lambda: models.PLE(width, self.expert, num_tasks, num_shared=half, num_own=half),
        }
        return models.MultiTask(tables, mixtures[self.mixture](), self.tower, num_tasks, self.expert[-1])


@dataclass(frozen=True, kw_only=True)
class TwoTowerConfig(TableOptions, ModelConfig):
    """Two-tower retrieval model, which ranks all catalog items by the dot product with a user vector."""

    embedding_dim: int = 64
    """Embedding width, the same for every table."""
    layers: tuple[int, ...] = (128, 64)
    """Layer sizes in both towers. The last size is the vector width."""
    temperature: float = 0.05
    """Number by which dot products are divided."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model, with tables on ``meta``.

        Raises:
            ValueError: the dataset has no item catalog.
        """
        if dataset.item is None or dataset.catalogue is None:
            raise ValueError(
                f"dataset {dataset.name!r} has no catalogue of its items, among which the towers are judged. "
                "Give Dataset one (item, catalogue)."
            )
        tables = _without_seen(dataset, self.embedding_dim)
        # Features in the catalog describe items; all remaining features belong to the user.
        of_items = set(dataset.catalogue.keys())
        towers = models.TwoTower(
            _build_on_meta(tables, self.table_std, is_weighted=dataset.has_id_weights),
            [name for table in tables for name in table.feature_names if name not in of_items],
            [name for table in tables for name in table.feature_names if name in of_items],
            self.layers,
            dense_in_features=dataset.num_dense,
        )
        trends = None
        if dataset.item_trends is not None:
            from meshrec.models.trends import TrendScores

            ids_I = dataset.catalogue[dataset.item].values().long()
            trends = TrendScores(ids_I, dataset.item_trends, dataset.trend_weight)
        return models.TowerRanking(
            towers,
            item=dataset.item,
            catalogue=dataset.catalogue,
            seen=seen_feature(dataset),
            temperature=self.temperature,
            trends=trends,
        )


@dataclass(frozen=True, kw_only=True)
class DINConfig(TableOptions, ModelConfig):
    """DIN: attention from the candidate item to the user's history, and an MLP; see `meshrec.models.DIN`."""

    attention: tuple[int, ...] = (64, 32)
    """Hidden layer sizes of the attention MLP, which weights the history items."""
    over: tuple[int, ...] = (128, 64)
    """Hidden layer sizes for the MLP over candidate, weighted history, and all other features."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model, with tables on ``meta``.

        Raises:
            ValueError: the dataset lacks an item, or does not have exactly one item history.
        """
        item, history = item_and_history(dataset)
        tables = _without_seen(dataset, self.embedding_dim)
        # The item and the history share this table. The model reads its rows unpooled, because attention
        # weights them. Rows of all other tables are pooled.
        item_table = next(table for table in tables if item in table.feature_names)
        other_tables = [table for table in tables if table is not item_table]
        bags = (
            _build_on_meta(other_tables, self.table_std, is_weighted=dataset.has_id_weights)
            if other_tables
            else None
        )
        return models.DIN(
            sequence_table(item_table, [history, item], std=self.table_std),
            bags,
            history=history,
            item=item,
            dense_in_features=dataset.num_dense,
            attention=self.attention,
            over=[*self.over, 1],
        )


def _without_seen(dataset: "Dataset", embedding_dim: int) -> list[EmbeddingBagConfig]:
    """Return the dataset's table configurations, but without the feature that lists seen items.

    Seen items only exclude items from a ranking. No model looks up embeddings for them.
    """
    return [
        replace(table, feature_names=names)
        for table in dataset.tables(embedding_dim)
        if (names := [name for name in table.feature_names if name != dataset.seen])
    ]


def item_and_history(dataset: "Dataset") -> tuple[str, str]:
    """Return the names of the item feature and of the history feature, which share a table.

    The history is the sequence feature that shares a table with ``dataset.item``. If ``dataset.item`` is
    None, the item may be any feature that is not a sequence.

    Raises:
        ValueError: the dataset does not have exactly one such pair of features.
    """
    # A feature without a table name has a table of its own name.
    table_of = {feature.name: feature.table or feature.name for feature in dataset.features}
    items = [feature.name for feature in dataset.features if not feature.sequence]
    pairs = [
        (item, feature.name)
        for item in (items if dataset.item is None else [dataset.item])
        for feature in dataset.features
        if feature.sequence and table_of[feature.name] == table_of[item]
    ]
    if len(pairs) != 1:
        raise ValueError(
            f"dataset {dataset.name!r} must name its item and have one history that shares the item's table: "
            f"the item is {dataset.item!r}, histories are {[history for _, history in pairs]}. Set "
            "Dataset.item, and a Feature with sequence=True and the item's table."
        )
    return pairs[0]


def seen_feature(dataset: "Dataset") -> str | None:
    """Return `Dataset.seen`, the name of the feature with the items to exclude from recommendations.

    Return None if the dataset does not name such a feature. If it nevertheless has a feature called "seen",
    log a warning, because the items in this feature are then recommended like all other items.
    """
    if dataset.seen is None and any(feature.name == "seen" for feature in dataset.features):
        _logger.warning(
            "dataset %r has a feature 'seen', but Dataset.seen is None: the items in it are recommended "
            "again. Set Dataset(seen='seen') to leave them out, or rename the feature.",
            dataset.name,
        )
    return dataset.seen


def sequence_table(
    table: EmbeddingBagConfig, features: Sequence[str], *, std: float | None = None
) -> EmbeddingCollection:
    """Build a table without pooling on ``meta``: a lookup returns an embedding per ID.

    Args:
        table: table configuration. Its features, pooling and initial values are ignored.
        features: names of the features that read the table.
        std: standard deviation for initial values; see `initial_values`.
    """
    config = EmbeddingConfig(
        name=table.name,
        num_embeddings=table.num_embeddings,
        keys=table.keys,
        embedding_dim=table.embedding_dim,
        feature_names=list(features),
        **initial_values(std, is_hashed=table.keys is not None),
    )
    return EmbeddingCollection(tables=[config], device=torch.device("meta"))


def tables_on_meta(
    dataset: "Dataset", embedding_dim: int, *, std: float | None = None
) -> EmbeddingBagCollection:
    """Build a dataset's tables (with pooling) on the meta device, where they take no memory.

    Sharding later allocates only the local shards.

    Args:
        dataset: the dataset, which determines the tables and the features that read them.
        embedding_dim: embedding width, the same for every table.
        std: standard deviation for initial values; see `initial_values`.
    """
    return _build_on_meta(dataset.tables(embedding_dim), std, is_weighted=dataset.has_id_weights)


def _build_on_meta(
    tables: Sequence[EmbeddingBagConfig], std: float | None, *, is_weighted: bool
) -> EmbeddingBagCollection:
    """Build tables with pooling on ``meta``."""
    tables = [replace(table, **initial_values(std, is_hashed=table.keys is not None)) for table in tables]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"), is_weighted=is_weighted)


def initial_values(std: float | None, *, is_hashed: bool) -> dict[str, Any]:
    """Return the table configuration options for initial values with a given standard deviation.

    Values are normally distributed. Tables with hashed keys use a uniform distribution, because an exported
    package must be able to compute the values of unknown IDs.

    Args:
        std: standard deviation; None: no options, which keeps the table's default.
        is_hashed: whether the table has hashed keys.
    """
    if std is None:
        return {}
    if is_hashed:
        # A uniform distribution on [-b, b] has standard deviation b / sqrt(3).
        bound = math.sqrt(3) * std
        return {"weight_init_min": -bound, "weight_init_max": bound}
    return {"init_fn": partial(nn.init.normal_, std=std)}
