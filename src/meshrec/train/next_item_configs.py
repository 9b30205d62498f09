"""Configurations of next-item models for recipes. Input sizes come from the dataset."""

from abc import ABC
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import nn
from typing_extensions import override

from meshrec.models import (
    HSTU,
    BERT4Rec,
    GRU4Rec,
    HistoryFeatures,
    HistoryModel,
    ItemCatalogue,
    SampledSoftmax,
    SASRec,
)
from meshrec.modules import EmbeddingCollection
from meshrec.train.architectures import item_and_history, seen_feature, sequence_table
from meshrec.train.recipe import ModelConfig

if TYPE_CHECKING:
    from meshrec.data import Dataset

# Defaults of the field `softmax`. Cosines are in [-1, 1], so they need a low temperature to reach
# probabilities near 1.
_DOT_PRODUCTS = SampledSoftmax()
_COSINES = SampledSoftmax(similarity="cosine", temperature=0.05)


@dataclass(frozen=True, kw_only=True)
class NextItemConfig(ABC):
    """Base class for next-item model configurations, with their common options."""

    embedding_dim: int = 64
    """Embedding width of the item table."""
    table_std: float | None = 0.02
    """Standard deviation for initial table values. None: small values whose size depends on the row count."""
    dropout: float = 0.2
    """Dropout rate in training."""
    softmax: SampledSoftmax = _DOT_PRODUCTS
    """Training loss: number of sampled negatives and similarity."""

    model: ClassVar[type[HistoryModel]]
    """Model class. Its constructor takes the fields of the subclass as keyword arguments."""

    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model for a dataset, with the item table on ``meta``; see `HistoryParts.of`."""
        # All fields are constructor arguments of the model, except those that are popped below.
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = HistoryParts.of(dataset, options.pop("embedding_dim"), options.pop("table_std"))
        # Only some configurations have the option `times`.
        times = dataset.times if options.pop("times", False) else None
        return self.model(
            parts.table,
            parts.features._replace(times=times),
            max_length=parts.max_length,
            items=parts.items,
            **options,
        )

    @property
    def attention_width(self) -> int:
        return self.embedding_dim


@dataclass(frozen=True, kw_only=True)
class SASRecConfig(NextItemConfig, ModelConfig):
    """SASRec: self-attention over the history predicts the next item; see `meshrec.models.SASRec`."""

    model: ClassVar[type[HistoryModel]] = SASRec

    num_blocks: int = 2
    """Number of attention blocks."""
    num_heads: int = 1
    """Number of attention heads."""


@dataclass(frozen=True, kw_only=True)
class HSTUConfig(NextItemConfig, ModelConfig):
    """HSTU: gated attention over the history predicts the next item; see `meshrec.models.HSTU`."""

    model: ClassVar[type[HistoryModel]] = HSTU

    softmax: SampledSoftmax = _COSINES
    """Training loss: number of sampled negatives and similarity."""
    num_blocks: int = 2
    """Number of layers."""
    num_heads: int = 1
    """Number of attention heads, among which the embedding width is divided."""
    times: bool = True
    """Whether the attention sees the time between items, if the data has times."""


@dataclass(frozen=True, kw_only=True)
class BERT4RecConfig(NextItemConfig, ModelConfig):
    """BERT4Rec: bidirectional attention predicts masked history items in training, and then the next item.

    See `meshrec.models.BERT4Rec`.
    """

    model: ClassVar[type[HistoryModel]] = BERT4Rec

    num_blocks: int = 2
    """Number of attention blocks."""
    num_heads: int = 2
    """Number of attention heads."""
    hidden: float = 0.2
    """Share of history items to mask in training."""


@dataclass(frozen=True, kw_only=True)
class GRU4RecConfig(NextItemConfig, ModelConfig):
    """GRU4Rec: a recurrent network over the history predicts the next item; see `meshrec.models.GRU4Rec`."""

    model: ClassVar[type[HistoryModel]] = GRU4Rec

    num_layers: int = 1
    """Number of recurrent layers."""
    hidden_dim: int = 128
    """Width of the recurrent state."""

    @property
    @override
    def attention_width(self) -> int:
        return 0


class HistoryParts(NamedTuple):
    """Constructor arguments of a `HistoryModel` which depend on the dataset.

    Attributes:
        table: item table, on ``meta``.
        features: names of the history, item and seen features.
        max_length: maximum number of items in a history.
        items: catalog of all items; None if the dataset has none.
    """

    table: EmbeddingCollection
    features: HistoryFeatures
    max_length: int
    items: ItemCatalogue | None

    @staticmethod
    def of(dataset: "Dataset", embedding_dim: int, std: float | None) -> "HistoryParts":
        """Create the arguments for a dataset.

        Args:
            dataset: the dataset.
            embedding_dim: embedding width of the item table.
            std: standard deviation for initial table values; None: the table's default.

        Raises:
            ValueError: the dataset lacks an item feature, does not have exactly one item history, or does not
                tell the history's maximum length.
        """
        item, history = item_and_history(dataset)
        table = next(
            candidate for candidate in dataset.tables(embedding_dim) if item in candidate.feature_names
        )
        feature = next(candidate for candidate in dataset.features if candidate.name == history)
        if feature.max_length is None:
            raise ValueError(
                f"dataset {dataset.name!r} does not say how long a history may be. Set max_length of its "
                f"feature {history!r}."
            )
        items = None
        if dataset.catalogue is not None:
            # Catalog features have one value per item.
            ids_I = dataset.catalogue[item].values().long()
            items = ItemCatalogue(
                ids_I,
                dataset.item_counts,
                dataset.new_user_scores,
                trends_I=dataset.item_trends,
                trend_weight=dataset.trend_weight,
            )
        return HistoryParts(
            sequence_table(table, [history, item], std=std),
            HistoryFeatures(history, item, seen_feature(dataset)),
            feature.max_length,
            items,
        )
