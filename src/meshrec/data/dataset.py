"""What every source of samples offers: features, readers, and a position that a checkpoint can hold."""

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

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What a model or the planner needs to size a table.

    Args:
        name: the key in ``Batch.sparse``.
        num_embeddings: ids lie in ``[0, num_embeddings)``.
        average_length: ids per sample.
        sequence: the ids have an order, the oldest first.
        table: features that name the same table share its rows; without it the table is named like the
            feature.
    """

    name: str
    num_embeddings: int
    average_length: float = 1.0
    sequence: bool = False
    table: str | None = None


class Position(NamedTuple):
    """How far training is: the samples of this epoch that all ranks together have consumed."""

    epoch: int = 0
    sample: int = 0


class FileRows(NamedTuple):
    """A file's rows among the row numbers of a reader: ``[first_row, first_row + num_rows)``."""

    name: str
    first_row: int
    num_rows: int


class FilePlaces(NamedTuple):
    """For each of B row numbers, which file (an index of `Reader.files`), and which row of it, from 0."""

    file_B: Tensor
    row_B: Tensor


def locate(files: Sequence[FileRows], rows: Tensor) -> FilePlaces:
    """Where ``Batch.rows`` are: the file of each row, and its number in there.

    Args:
        files: `Reader.files`.
        rows: [B] int64.
    """
    starts = torch.tensor([each.first_row for each in files])
    file = torch.searchsorted(starts, rows, right=True) - 1
    return FilePlaces(file, rows - starts[file])


class Reader(ABC):
    """Samples in an order that is a pure function of (seed, epoch).

    Step s of an epoch takes samples ``[s * W * B, (s + 1) * W * B)`` of that order, with W ranks and batches
    of B samples. A :class:`Position` therefore resumes at the exact sample, with another number of ranks or
    another batch size too.
    """

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples of one epoch, over all ranks."""

    @property
    @abstractmethod
    def files(self) -> Sequence[FileRows]:
        """What ``Batch.rows`` count over, in order: rows that are not in a part of the data count, too."""

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
        """The rest of one epoch from ``position``: this rank's part.

        All ranks yield the same number of batches; the last one may be smaller, or empty on some.

        Args:
            batch_size: samples per batch and rank.
            position: where the epoch goes on.
            rank, world_size: which part.
            drop_last: leave out the last step if it is not full on all ranks.

        Raises:
            ValueError: for sizes, ranks or positions out of range.
        """


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Samples to train on, samples to choose and to judge by, and what they consist of.

    Args:
        name: for reports.
        features: the keys of ``Batch.sparse``, in order.
        num_dense: columns of ``Batch.dense``.
        train, validation, test: the readers; validation chooses among weights, test judges those that were
            chosen, once. Both keep the order of the data.
        item: the feature that names what is recommended, where there is one.
        seen: the feature that holds the items which are not to be recommended again, where there is one.
        catalogue: one sample for each row of the item's table, with the features that belong to items.
        best_auc: the AUC that nothing can beat on ``validation``, where it is known.
        open: ``open(paths, labelled)`` reads other files of the same form, in their order: with labels, to
            judge by, or without, to be scored; None where the data has no files.
        has_id_weights: whether the ids of batches have weights.
        labels: names of the labels, where there are several.
        id_columns: columns of the data that its ids come from, where they are not named like the features.
        skipped: rows that were left out as damaged so far, by file and reason, each row once.
    """

    name: str
    features: tuple[Feature, ...]
    num_dense: int
    train: Reader
    validation: Reader | None = None
    test: Reader | None = None
    item: str | None = None
    seen: str | None = None
    catalogue: KeyedJaggedTensor | None = None
    best_auc: float | None = None
    skipped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    open: Callable[[Paths, bool], Reader] | None = None
    id_columns: tuple[str, ...] = ()
    has_id_weights: bool = False
    labels: tuple[str, ...] = ()

    def tables(self, embedding_dim: int) -> list[EmbeddingBagConfig]:
        """One table per feature (or group of features that share one), all of one width.

        Pools by MEAN where a feature is a sequence, and by SUM elsewhere.
        """
        return embedding_bag_configs(self.features, embedding_dim)


def embedding_bag_configs(features: Sequence[Feature], embedding_dim: int) -> list[EmbeddingBagConfig]:
    """Tables for ``features``; see :meth:`Dataset.tables`.

    Raises:
        ValueError: features of one table differ in ``num_embeddings``.
    """
    groups: dict[str, list[Feature]] = {}
    for feature in features:
        groups.setdefault(feature.table or feature.name, []).append(feature)
    for name, group in groups.items():
        sizes = sorted({feature.num_embeddings for feature in group})
        if len(sizes) > 1:
            raise ValueError(
                f"table {name!r}: its features {[feature.name for feature in group]} have different "
                f"num_embeddings {sizes}. Give them one size, or tables of their own."
            )
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=group[0].num_embeddings,
            embedding_dim=embedding_dim,
            feature_names=[feature.name for feature in group],
            pooling=PoolingType.MEAN if any(each.sequence for each in group) else PoolingType.SUM,
        )
        for name, group in groups.items()
    ]
