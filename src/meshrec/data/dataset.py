"""Data source interface: features, readers, and a position stored in checkpoints."""

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
from meshrec.tables.hashed.keys import Hashed

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Feature description, as needed by models and the planner to size the table.

    Args:
        name: key in ``Batch.sparse``.
        num_embeddings: IDs are in ``[0, num_embeddings)``. 0: the values are not IDs, and no table reads
            them.
        average_length: mean IDs per sample.
        sequence: whether the IDs are ordered, oldest first.
        table: table name. Features with the same table share rows. None: a table with the feature's name.
        keys: hashed key options: any int64 is an ID, and ``num_embeddings`` is the maximum number of rows.
            None: IDs are rows.
        max_length: maximum IDs per sample; None: unknown.
    """

    name: str
    num_embeddings: int
    average_length: float = 1.0
    sequence: bool = False
    table: str | None = None
    keys: Hashed | None = None
    max_length: int | None = None


class Position(NamedTuple):
    """Training progress: samples of this epoch consumed by all ranks together."""

    epoch: int = 0
    sample: int = 0


class RowsOfFile(NamedTuple):
    """Row numbers of a file within a reader: ``[first_row, first_row + num_rows)``."""

    name: str
    first_row: int
    num_rows: int


class FileRows(NamedTuple):
    """File (index into `Reader.files`) and row within it (from 0), for B samples."""

    file_B: Tensor
    row_B: Tensor


def locate(files: Sequence[RowsOfFile], rows: Tensor) -> FileRows:
    """Return the file and the row within it for row numbers in ``Batch.rows``.

    Args:
        files: `Reader.files`.
        rows: row numbers [B], int64.
    """
    starts = torch.tensor([file.first_row for file in files])
    file_B = torch.searchsorted(starts, rows, right=True) - 1
    return FileRows(file_B, rows - starts[file_B])


class Reader(ABC):
    """Samples in an order that is a pure function of (seed, epoch).

    Step s of an epoch takes samples ``[s * W * B, (s + 1) * W * B)`` in that order, for W ranks and batches
    of B samples. A `Position` counts samples, not steps, so training resumes at the exact sample even if W or
    B changes.
    """

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples per epoch, over all ranks."""

    @property
    @abstractmethod
    def files(self) -> Sequence[RowsOfFile]:
        """Files numbered consecutively by ``Batch.rows``, including rows outside this part of the data."""

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
        """Yield this rank's batches for an epoch, starting at ``position``.

        All ranks yield equally many batches. The last batch may be smaller, or empty on some ranks.

        Args:
            batch_size: samples per batch and rank.
            position: start position.
            rank: this rank.
            world_size: rank count.
            drop_last: whether to omit the last step if it is not full on all ranks.

        Raises:
            ValueError: a size, rank or position is out of range.
        """


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Readers for training, validation and test samples, and a sample description.

    Args:
        name: display name.
        features: ``Batch.sparse`` keys, in order.
        num_dense: ``Batch.dense`` columns.
        train: training reader.
        validation: reader for samples that select the best weights, in data order.
        test: reader for samples that evaluate the selected weights once, in data order.
        item: feature with the recommended item, if any.
        seen: feature with items that must not be recommended again, if any.
        times: feature with history timestamps in seconds, if any.
        catalogue: a sample per recommendable item, with item features. IDs ascend.
        item_counts: training target counts per catalog item, [items].
        new_user_scores: scores of all catalog items for a user without a history, [items].
        best_auc: best possible AUC on ``validation``, if known.
        open: ``open(paths, labelled)`` reads other files in the same format, in order: with labels for
            evaluation, or without for scoring. None without files.
        has_id_weights: whether IDs have weights.
        labels: label names, if there are several.
        id_columns: source columns for IDs, if named differently from the features.
        number_edges: bin edges per ``Batch.dense`` column, empty for a column without bins. No entries: no
            bins.
        dense_names: ``Batch.dense`` column names, if known.
        num_classes: label classes, with a logit each; 0: a single logit.
        skipped: damaged rows omitted so far, by file and reason. Rows are counted once.
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
    new_user_scores: Tensor | None = None
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
        """Return a table per feature, or per group of features sharing a table, all with the same width.

        Sequence features are mean-pooled, others sum-pooled.
        """
        return embedding_bag_configs(self.features, embedding_dim)


def embedding_bag_configs(features: Sequence[Feature], embedding_dim: int) -> list[EmbeddingBagConfig]:
    """Return the tables for ``features``; see `Dataset.tables`.

    Raises:
        ValueError: features sharing a table differ in ``num_embeddings`` or ``keys``.
    """
    groups: dict[str, list[Feature]] = {}
    for feature in features:
        # Values such as timestamps have no table.
        if not feature.num_embeddings:
            continue
        groups.setdefault(feature.table or feature.name, []).append(feature)
    for name, group in groups.items():
        for attribute in ("num_embeddings", "keys"):
            values = [getattr(feature, attribute) for feature in group]
            if any(value != values[0] for value in values):
                raise ValueError(
                    f"table {name!r}: its features {[feature.name for feature in group]} have different "
                    f"{attribute} {values}. Give them the same, or tables of their own."
                )
    return [
        EmbeddingBagConfig(
            name=name,
            keys=group[0].keys,
            num_embeddings=group[0].num_embeddings,
            embedding_dim=embedding_dim,
            feature_names=[feature.name for feature in group],
            pooling=PoolingType.MEAN if any(feature.sequence for feature in group) else PoolingType.SUM,
        )
        for name, group in groups.items()
    ]
