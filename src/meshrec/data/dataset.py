"""Interface of every data source: features, readers, and a position that a checkpoint can store."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.data.batch import Batch
from meshrec.modules import EmbeddingBagConfig, PoolingType
from meshrec.sparse import KeyedJaggedTensor
from meshrec.tables.hashed_keys import Hashed

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature, with everything that a model or the planner needs to size its table.

    Args:
        name: key of the feature in ``Batch.sparse``.
        num_embeddings: IDs lie in ``[0, num_embeddings)``. 0: the values are no IDs, and no table reads them.
        average_length: average number of IDs per sample.
        sequence: whether the IDs are ordered, oldest first.
        table: name of the table. Features that name the same table share its rows. None: a table named like
            the feature.
        keys: those of a table with hashed keys: any int64 is an ID, and ``num_embeddings`` is the number of
            rows that there may be. None: IDs are rows.
        max_length: largest number of IDs per sample; None: it is not known.
    """

    name: str
    num_embeddings: int
    average_length: float = 1.0
    sequence: bool = False
    table: str | None = None
    keys: Hashed | None = None
    max_length: int | None = None


class Position(NamedTuple):
    """Progress of training: the number of samples of this epoch that all ranks together have consumed."""

    epoch: int = 0
    sample: int = 0


class RowsOfFile(NamedTuple):
    """Row numbers of a file within a reader: ``[first_row, first_row + num_rows)``."""

    name: str
    first_row: int
    num_rows: int


class FilePlaces(NamedTuple):
    """The file (an index of `Reader.files`) and the row in it (from 0) of each of B samples."""

    file_B: Tensor
    row_B: Tensor


def locate(files: Sequence[RowsOfFile], rows: Tensor) -> FilePlaces:
    """Return the file and the row within it of each row number in ``Batch.rows``.

    Args:
        files: `Reader.files`.
        rows: row numbers [B], int64.
    """
    starts = torch.tensor([each.first_row for each in files])
    file = torch.searchsorted(starts, rows, right=True) - 1
    return FilePlaces(file, rows - starts[file])


class Reader(ABC):
    """Samples in an order that is a pure function of (seed, epoch).

    Step s of an epoch takes samples ``[s * W * B, (s + 1) * W * B)`` of that order, for W ranks and batches
    of B samples. Therefore a `Position` resumes at the exact sample, even with another number of ranks or
    another batch size.
    """

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Number of samples of one epoch, over all ranks."""

    @property
    @abstractmethod
    def files(self) -> Sequence[RowsOfFile]:
        """Files that ``Batch.rows`` number consecutively, including rows that are not in this part of the
        data.
        """

    @abstractmethod
    def batches(
        self,
        batch_size: int,
        *,
        position: Position = Position(),  # noqa: B008 - immutable
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Yield this rank's batches of one epoch, starting at ``position``.

        All ranks yield the same number of batches. The last batch may be smaller, or empty on some ranks.

        Args:
            batch_size: samples per batch and rank.
            position: position at which to start.
            rank, world_size: this rank, and the number of ranks.
            drop_last: whether to leave out the last step if it is not full on all ranks.

        Raises:
            ValueError: a size, rank or position is out of range.
        """


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset: readers of the training, validation and test samples, and a description of the samples.

    Args:
        name: name for reports.
        features: the keys of ``Batch.sparse``, in order.
        num_dense: number of columns of ``Batch.dense``.
        train, validation, test: the readers. Validation data selects the weights; test data evaluates the
            selected ones, once. Both keep the order of the data.
        item: name of the feature that holds the recommended item, if there is one.
        seen: name of the feature with items that must not be recommended again, if there is one.
        times: name of the feature with the times of the history's items in seconds, if there is one.
        catalogue: one sample for each item that can be recommended, with the features of items. Their IDs
            ascend.
        item_counts: how often each item of the catalogue is a target in the training data, [items].
        best_auc: the highest possible AUC on ``validation``, if it is known.
        open: ``open(paths, labelled)`` reads other files of the same form in their order: with labels for
            evaluation, or without for scoring. None if the data has no files.
        has_id_weights: whether the IDs of batches have weights.
        labels: names of the labels, if there are several.
        id_columns: columns of the data from which the IDs come, if they are not named like the features.
        number_edges: edges of the bins of each column of ``Batch.dense``, empty for a column without bins. No
            entries at all: there are no bins.
        dense_names: names of the columns of ``Batch.dense``, where they are known.
        num_classes: number of classes of the label, each of which has a logit; 0: one logit.
        skipped: number of damaged rows that were left out so far, by file and reason. Each row counts once.
    """

    name: str
    features: tuple[Feature, ...]
    num_dense: int
    train: Reader
    validation: Reader | None = None
    test: Reader | None = None
    item: str | None = None
    seen: str | None = None
    times: str | None = None
    catalogue: KeyedJaggedTensor | None = None
    item_counts: Tensor | None = None
    best_auc: float | None = None
    skipped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    open: Callable[[Paths, bool], Reader] | None = None
    id_columns: tuple[str, ...] = ()
    has_id_weights: bool = False
    labels: tuple[str, ...] = ()
    number_edges: tuple[tuple[float, ...], ...] = ()
    num_classes: int = 0
    dense_names: tuple[str, ...] = ()

    def tables(self, embedding_dim: int) -> list[EmbeddingBagConfig]:
        """Return one table per feature, or per group of features that share one, all of one width.

        Sequence features are pooled by MEAN, others by SUM.
        """
        return embedding_bag_configs(self.features, embedding_dim)


def embedding_bag_configs(features: Sequence[Feature], embedding_dim: int) -> list[EmbeddingBagConfig]:
    """Return the tables for ``features``; see `Dataset.tables`.

    Raises:
        ValueError: features of one table differ in ``num_embeddings`` or ``keys``.
    """
    groups: dict[str, list[Feature]] = {}
    for feature in features:
        if not feature.num_embeddings:
            continue
        groups.setdefault(feature.table or feature.name, []).append(feature)
    for name, group in groups.items():
        sizes = sorted({feature.num_embeddings for feature in group})
        if len(sizes) > 1:
            raise ValueError(
                f"table {name!r}: its features {[feature.name for feature in group]} have different "
                f"num_embeddings {sizes}. Give them one size, or tables of their own."
            )
        if any(feature.keys != group[0].keys for feature in group):
            raise ValueError(
                f"table {name!r}: its features {[feature.name for feature in group]} have different keys. "
                "Give them the same, or tables of their own."
            )
    return [
        EmbeddingBagConfig(
            name=name,
            keys=group[0].keys,
            num_embeddings=group[0].num_embeddings,
            embedding_dim=embedding_dim,
            feature_names=[feature.name for feature in group],
            pooling=PoolingType.MEAN if any(each.sequence for each in group) else PoolingType.SUM,
        )
        for name, group in groups.items()
    ]
