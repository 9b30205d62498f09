"""The models that recipes choose from, sized by the dataset."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from meshrec.models import DLRM, DLRM_DCN, PLE, DeepFM, Mixture, MMoE, MultiTask, SharedBottom
from meshrec.modules import EmbeddingBagCollection
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
        return DeepFM(
            tables_on_meta(dataset, self.embedding_dim, std=self.table_std),
            dataset.num_dense,
            [*self.bottom, self.embedding_dim],
            [*self.deep, 1],
        )


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


def tables_on_meta(
    dataset: "Dataset", embedding_dim: int, *, std: float | None = None
) -> EmbeddingBagCollection:
    """The tables of a dataset, all of one width; sharding allocates what each rank owns.

    ``std``: of normal first values; None: the tables' own.
    """
    tables = dataset.tables(embedding_dim)
    if std is not None:
        tables = [replace(table, init_fn=partial(nn.init.normal_, std=std)) for table in tables]
    return EmbeddingBagCollection(
        tables=tables, device=torch.device("meta"), is_weighted=dataset.has_id_weights
    )
