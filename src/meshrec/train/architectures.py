"""The models that recipes choose from, sized by the dataset."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshrec.models import DLRM, DLRM_DCN, DeepFM
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


def tables_on_meta(
    dataset: "Dataset", embedding_dim: int, *, std: float | None = None
) -> EmbeddingBagCollection:
    """The tables of a dataset, all of one width; sharding allocates what each rank owns.

    ``std``: of normal first values; None: the tables' own.
    """
    tables = dataset.tables(embedding_dim)
    if std is not None:
        tables = [replace(table, init_fn=partial(nn.init.normal_, std=std)) for table in tables]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
