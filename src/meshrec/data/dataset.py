"""Interface between data and training: datasets, their features and readers, and a reader's position."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.data.batch import Batch
from meshrec.modules import EmbeddingBagConfig, PoolingType
from meshrec.sparse import KeyedJaggedTensor
from meshrec.tables.hashed.keys import Hashed

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Description of a feature with IDs, from which models and the planner size its embedding table.

    Args:
        name: key in ``Batch.sparse``.
        num_embeddings: rows of the table; IDs are in ``[0, num_embeddings)``. 0: the values are not IDs, such
            as timestamps, and have no table.
        average_length: mean IDs per sample.
        sequence: whether the IDs of a sample are in time order, oldest first.
        table: name of the embedding table. Features with the same name share the table. None: the feature has
            a table of the same name.
        keys: options of a hashed table, where any int64 is an ID, and ``num_embeddings`` is the maximum rows.
            None: the table has a fixed size, and an ID is a row index.
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
    """Training progress, as stored in checkpoints."""

    epoch: int = 0
    """Epoch, from 0."""
    sample: int = 0
    """Samples that all ranks together have consumed in this epoch."""


class RowsOfFile(NamedTuple):
    """File of a reader, and its row numbers in ``Batch.rows``: ``[first_row, first_row + num_rows)``.

    A reader numbers the rows of all files consecutively.
    """

    name: str
    first_row: int
    num_rows: int


class FileRows(NamedTuple):
    """Files and rows from which B samples were read; see `locate`."""

    file_B: Tensor
    """Index into `Reader.files` per sample, int64 [B]."""
    row_B: Tensor
    """Row number in the file per sample, from 0, int64 [B]."""


def locate(files: Sequence[RowsOfFile], rows: Tensor) -> FileRows:
    """Convert the row numbers in ``Batch.rows`` to files, and row numbers in these files.

    Args:
        files: ``Reader.files`` of the reader that returned the batch.
        rows: row numbers, int64 [B].
    """
    starts = torch.tensor([file.first_row for file in files])
    # The last file that starts at the row or before it.
    file_B = torch.searchsorted(starts, rows, right=True) - 1
    return FileRows(file_B, rows - starts[file_B])


class Reader(ABC):
    """Reader that divides an epoch's samples into batches for all ranks.

    The sample order is a pure function of (seed, epoch). With W ranks and B samples per batch, step s takes
    the samples ``[s * W * B, (s + 1) * W * B)`` in this order. A `Position` counts samples, not steps, so
    training resumes at the exact sample even if W or B changes.
    """

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples per epoch, over all ranks."""

    @property
    @abstractmethod
    def files(self) -> Sequence[RowsOfFile]:
        """Files to which the row numbers in ``Batch.rows`` refer, numbered consecutively over all files.

        The files may have more rows than the reader has samples, such as the rows of validation data.
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
        """Yield this rank's batches for an epoch, starting at ``position``.

        All ranks yield equally many batches. The last batch may be smaller, or empty on some ranks.

        Args:
            batch_size: samples per batch and rank.
            position: start position.
            rank: this rank.
            world_size: rank count.
            drop_last: whether to omit a last step with fewer than ``batch_size * world_size`` samples.

        Raises:
            ValueError: a size, rank or position is out of range.
        """


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Training, validation and test data for a model, and a description of the samples.

    Args:
        name: display name.
        features: features in ``Batch.sparse``, in key order.
        num_dense: number of columns in ``Batch.dense``.
        train: reader for training samples.
        validation: reader for the samples on which the best weights are selected, in data order.
        test: reader for the samples on which the selected weights are evaluated once, in data order.
        item: feature with the recommended item, by name; None without one.
        seen: feature with items that must not be recommended again, if any.
        times: feature with history timestamps, in seconds, by name, if any.
        catalogue: features of all items that can be recommended: a sample per item, by ascending item ID.
        item_counts: how often an item is a training target, per catalog item, int64 [items].
        new_user_scores: score per catalog item for a user without a history, float32 [items].
        item_trends: popularity trend per catalog item, float32 [items]; see [Note: new items] in
            ``data/item_trends.py``.
        trend_weight: factor for ``item_trends`` when they are added to scores.
        num_held_out: number of all held-out samples, under the key "validation" or "test". A key is present
            only if the reader has a random sample of them.
        best_auc: best possible AUC on ``validation``, if known, as for synthetic data.
        open: function ``open(paths, labelled)``, which returns a reader for other files in the same format,
            in file order. ``labelled`` is true for evaluation, and false for scoring files without labels.
            None if the data is not from files.
        has_id_weights: whether IDs have weights.
        labels: label names, if there are several.
        id_columns: file columns from which IDs are read. Empty: they are named like the features.
        number_edges: bin edges per ``Batch.dense`` column, for models that embed numbers; an empty tuple for
            a column without bins. No entries: no column has bins.
        dense_names: names of the ``Batch.dense`` columns, if known.
        num_classes: classes of a class label, for which the model needs a logit per class. 0: the model has a
            single logit.
        arrow_schema: Arrow schema of the columns from which a sample is encoded, if samples are table rows.
        skipped: damaged rows omitted so far, counted by file and reason. A row that is read again is not
            counted again.
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
    item_trends: Tensor | None = None
    trend_weight: float = 0.0
    num_held_out: Mapping[str, int] = field(default_factory=dict)
    best_auc: float | None = None
    skipped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    open: Callable[[Paths, bool], Reader] | None = None
    id_columns: tuple[str, ...] = ()
    has_id_weights: bool = False
    labels: tuple[str, ...] = ()
    number_edges: tuple[tuple[float, ...], ...] = ()
    num_classes: int = 0
    dense_names: tuple[str, ...] = ()
    arrow_schema: Any = None

    def tables(self, embedding_dim: int) -> list[EmbeddingBagConfig]:
        """Return the embedding table configurations, all with dimension ``embedding_dim``.

        Features with the same table name share a table. A table is mean-pooled if any of its features is a
        sequence, otherwise sum-pooled.
        """
        return embedding_bag_configs(self.features, embedding_dim)


def embedding_bag_configs(features: Sequence[Feature], embedding_dim: int) -> list[EmbeddingBagConfig]:
    """Return the embedding table configurations for ``features``; see `Dataset.tables`.

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
        # Features with the same table must agree on its size.
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
            # A sum over a history would grow with the length.
            pooling=PoolingType.MEAN if any(feature.sequence for feature in group) else PoolingType.SUM,
        )
        for name, group in groups.items()
    ]
