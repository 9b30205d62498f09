"""The models that recipes choose from, sized by the dataset."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from meshrec.models import (
    DIN,
    DLRM,
    DLRM_DCN,
    PLE,
    DeepFMModel,
    Mixture,
    MMoE,
    MultiTask,
    SASRec,
    SharedBottom,
    TowerRanking,
    TwoTower,
    TwoTowerClicks,
)
from meshrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from meshrec.train.recipe import ModelConfig

if TYPE_CHECKING:
    from meshrec.data import Dataset


@dataclass(frozen=True, kw_only=True)
class DLRMConfig(ModelConfig):
    """DLRM: embeddings, an MLP over dense values, dot products of all pairs, and an MLP over all that."""

    embedding_dim: int = 16
    """The width of every table."""
    table_std: float | None = None
    """Standard deviation of the tables' first values; if none, small ones that depend on the rows."""
    bottom: tuple[int, ...] = (64,)
    """Hidden layers over the dense values."""
    top: tuple[int, ...] = (64, 32)
    """Hidden layers over the dot products."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """The model, its tables on ``meta``."""
        return DLRM(
            tables_on_meta(dataset, self.embedding_dim, std=self.table_std),
            dataset.num_dense,
            [*self.bottom, self.embedding_dim],
            [*self.top, 1],
        )


@dataclass(frozen=True, kw_only=True)
class DLRMDCNConfig(ModelConfig):
    """DLRM with a low-rank cross network in place of the dot products."""

    embedding_dim: int = 16
    """The width of every table."""
    table_std: float | None = None
    """Standard deviation of the tables' first values; if none, small ones that depend on the rows."""
    bottom: tuple[int, ...] = (64,)
    """Hidden layers over the dense values."""
    top: tuple[int, ...] = (64, 32)
    """Hidden layers over the crosses."""
    num_crosses: int = 2
    """Cross layers."""
    low_rank_dim: int = 32
    """Columns inside a cross."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """The model, its tables on ``meta``."""
        return DLRM_DCN(
            tables_on_meta(dataset, self.embedding_dim, std=self.table_std),
            dataset.num_dense,
            [*self.bottom, self.embedding_dim],
            [*self.top, 1],
            self.num_crosses,
            self.low_rank_dim,
        )


@dataclass(frozen=True, kw_only=True)
class DeepFMConfig(ModelConfig):
    """DeepFM: a linear term, products of all pairs, and an MLP, over the same embeddings."""

    embedding_dim: int = 16
    """The width of every table."""
    table_std: float | None = None
    """Standard deviation of the tables' first values; if none, small ones that depend on the rows."""
    bottom: tuple[int, ...] = (64,)
    """Hidden layers over the dense values."""
    deep: tuple[int, ...] = (64, 32)
    """Hidden layers over all vectors."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """The model, its tables on ``meta``."""
        return DeepFMModel(
            tables_on_meta(dataset, self.embedding_dim, std=self.table_std),
            dataset.num_dense,
            [*self.bottom, self.embedding_dim],
            [*self.deep, 1],
        )


@dataclass(frozen=True, kw_only=True)
class ClickTowersConfig(ModelConfig):
    """Two towers over clicks: the product of a query's and an item's vector is the logit. Dense values are of
    the query. `meshrec export --tower` gives the vectors of one side."""

    item_features: tuple[str, ...] = ()
    """What the item tower reads; the query tower reads all else. If none, the dataset's item."""
    embedding_dim: int = 16
    """The width of every table."""
    table_std: float | None = None
    """Standard deviation of the tables' first values; if none, small ones that depend on the rows."""
    layers: tuple[int, ...] = (64, 32)
    """Layers of both towers; the last is the width of the vectors."""
    temperature: float = 0.1
    """Products are divided by it."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """The model, its tables on ``meta``; ValueError where no feature is the item's."""
        items = self.item_features or ((dataset.item,) if dataset.item is not None else ())
        if not items:
            raise ValueError(
                f"dataset {dataset.name!r} does not say which feature is the item's. Set model.item_features."
            )
        tables = tables_on_meta(dataset, self.embedding_dim, std=self.table_std)
        query = [feature.name for feature in dataset.features if feature.name not in items]
        towers = TwoTower(tables, query, items, self.layers, dataset.num_dense)
        return TwoTowerClicks(towers, temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class MultiTaskConfig(ModelConfig):
    """Several labels: a mixture over embeddings and dense values, and a tower for each label."""

    mixture: Literal["shared_bottom", "mmoe", "ple"] = "mmoe"
    """One bottom for all tasks, gates over shared experts, or shared experts beside those of each task."""
    embedding_dim: int = 16
    """The width of every table."""
    table_std: float | None = None
    """Standard deviation of the tables' first values; if none, small ones that depend on the rows."""
    expert: tuple[int, ...] = (64, 32)
    """Layers of the bottom, or of each expert."""
    num_experts: int = 4
    """Experts of MMoE; of PLE half of them are shared, and each task has half as many of its own."""
    tower: tuple[int, ...] = (32,)
    """Hidden layers of each task's tower."""

    def __post_init__(self) -> None:
        if self.num_experts < 2:
            raise ValueError(f"model.num_experts is {self.num_experts}; it must be at least 2.")

    def build(self, dataset: "Dataset") -> nn.Module:
        """The model, its tables on ``meta``; ValueError for data of one label."""
        num_tasks = len(dataset.labels)
        if num_tasks < 2:
            raise ValueError(
                f"dataset {dataset.name!r} has one label, and this model is for several. Give Features more "
                "labels, or take another model."
            )
        tables = tables_on_meta(dataset, self.embedding_dim, std=self.table_std)
        width = dataset.num_dense + self.embedding_dim * len(dataset.features)
        half = self.num_experts // 2
        mixtures: dict[str, Callable[[], Mixture]] = {
            "shared_bottom": lambda: SharedBottom(width, self.expert, num_tasks),
            "mmoe": lambda: MMoE(width, self.expert, num_tasks, self.num_experts),
            "ple": lambda: PLE(width, self.expert, num_tasks, num_shared=half, num_own=half),
        }
        return MultiTask(tables, mixtures[self.mixture](), self.tower, num_tasks, self.expert[-1])


@dataclass(frozen=True, kw_only=True)
class SASRecConfig(ModelConfig):
    """Self-attention over a history says which item comes next; see `meshrec.models.SASRec`."""

    embedding_dim: int = 64
    """The width of the items' table."""
    table_std: float | None = 0.02
    """Standard deviation of the table's first values; if none, small ones that depend on the rows."""
    max_length: int = 50
    """The most items of a history."""
    num_blocks: int = 2
    """Blocks of attention."""
    num_heads: int = 1
    """Heads of the attention."""
    dropout: float = 0.2
    """Share of values that training drops."""
    num_drawn: int = 512
    """Items that training draws for each step and rank."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """The model, its table on ``meta``; ValueError for data without an item and one history of it."""
        item, history = item_and_history(dataset)
        table = next(each for each in dataset.tables(self.embedding_dim) if item in each.feature_names)
        return SASRec(
            sequence_table(table, [history, item], std=self.table_std),
            history=history,
            item=item,
            seen=dataset.seen,
            max_length=self.max_length,
            num_blocks=self.num_blocks,
            num_heads=self.num_heads,
            dropout=self.dropout,
            num_drawn=self.num_drawn,
        )


@dataclass(frozen=True, kw_only=True)
class TwoTowerConfig(ModelConfig):
    """A tower for users and one for items, whose best products are sought among all items."""

    embedding_dim: int = 64
    """The width of every table."""
    table_std: float | None = None
    """Standard deviation of the tables' first values; if none, small ones that depend on the rows."""
    layers: tuple[int, ...] = (128, 64)
    """Layers of both towers; the last is the vectors' width."""
    temperature: float = 0.05
    """Products are divided by it."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """The model, its tables on ``meta``; ValueError for data without a catalogue of its items."""
        if dataset.item is None or dataset.catalogue is None:
            raise ValueError(
                f"dataset {dataset.name!r} has no catalogue of its items, among which the towers are judged. "
                "Give Dataset one (item, catalogue)."
            )
        tables = [
            replace(each, feature_names=names)
            for each in dataset.tables(self.embedding_dim)
            if (names := [name for name in each.feature_names if name != dataset.seen])
        ]
        of_items = set(dataset.catalogue.keys())
        towers = TwoTower(
            _on_meta(tables, self.table_std, is_weighted=dataset.has_id_weights),
            [name for each in tables for name in each.feature_names if name not in of_items],
            [name for each in tables for name in each.feature_names if name in of_items],
            self.layers,
            dataset.num_dense,
        )
        return TowerRanking(
            towers,
            item=dataset.item,
            catalogue=dataset.catalogue,
            seen=dataset.seen,
            temperature=self.temperature,
        )


@dataclass(frozen=True, kw_only=True)
class DINConfig(ModelConfig):
    """DIN: attention over a history by the item that is offered, and an MLP; see `meshrec.models.DIN`."""

    embedding_dim: int = 16
    """The width of every table."""
    table_std: float | None = None
    """Standard deviation of the tables' first values; if none, small ones that depend on the rows."""
    attention: tuple[int, ...] = (64, 32)
    """Hidden layers of the MLP that weighs the history."""
    over: tuple[int, ...] = (128, 64)
    """Hidden layers over all vectors."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """The model, its tables on ``meta``; ValueError for data without an item and one history of it."""
        item, history = item_and_history(dataset)
        tables = dataset.tables(self.embedding_dim)
        own = next(each for each in tables if item in each.feature_names)
        others = [each for each in tables if each is not own]
        bags = _on_meta(others, self.table_std, is_weighted=dataset.has_id_weights) if others else None
        return DIN(
            sequence_table(own, [history, item], std=self.table_std),
            bags,
            history=history,
            item=item,
            dense_in_features=dataset.num_dense,
            attention=self.attention,
            over=[*self.over, 1],
        )


def item_and_history(dataset: "Dataset") -> tuple[str, str]:
    """The feature of the item, and that of the items before it, in order.

    Raises:
        ValueError: the dataset has no such two.
    """
    table_of = {each.name: each.table or each.name for each in dataset.features}
    histories = [
        each.name
        for each in dataset.features
        if each.sequence and dataset.item is not None and table_of[each.name] == table_of[dataset.item]
    ]
    if dataset.item is None or len(histories) != 1:
        raise ValueError(
            f"dataset {dataset.name!r} must name its item and have one history that shares the item's table: "
            f"the item is {dataset.item!r}, histories are {histories}. Set Dataset.item, and a Feature with "
            "sequence=True and the item's table."
        )
    return dataset.item, histories[0]


def sequence_table(
    table: EmbeddingBagConfig, features: Sequence[str], *, std: float | None = None
) -> EmbeddingCollection:
    """A table whose rows are not pooled, on ``meta``, for some of its features."""
    config = EmbeddingConfig(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        feature_names=list(features),
        init_fn=None if std is None else partial(nn.init.normal_, std=std),
    )
    return EmbeddingCollection(tables=[config], device=torch.device("meta"))


def tables_on_meta(
    dataset: "Dataset", embedding_dim: int, *, std: float | None = None
) -> EmbeddingBagCollection:
    """The tables of a dataset, all of one width; sharding allocates what each rank owns.

    ``std``: of normal first values; None: the tables' own.
    """
    return _on_meta(dataset.tables(embedding_dim), std, is_weighted=dataset.has_id_weights)


def _on_meta(
    tables: Sequence[EmbeddingBagConfig], std: float | None, *, is_weighted: bool
) -> EmbeddingBagCollection:
    if std is not None:
        tables = [replace(table, init_fn=partial(nn.init.normal_, std=std)) for table in tables]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"), is_weighted=is_weighted)
