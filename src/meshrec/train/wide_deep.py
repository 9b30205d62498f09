"""Wide & deep, which `meshrec inspect` proposes, sized by the dataset."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from meshrec.models import WideDeep
from meshrec.modules import EmbeddingBagCollection
from meshrec.train.architectures import tables_on_meta
from meshrec.train.recipe import ModelConfig

if TYPE_CHECKING:
    from meshrec.data import Dataset


@dataclass(frozen=True, kw_only=True)
class WideDeepConfig(ModelConfig):
    """Wide and deep: linear terms, products of pairs, and an ensemble of MLPs, with embeddings of numbers."""

    embedding_dim: int = 8
    """Width of every table; the first column is the linear weight."""
    table_std: float | None = 0.01
    """Standard deviation of the tables' initial values; if none, small values that depend on the number of
    rows.
    """
    layers: tuple[int, ...] = (128, 64)
    """Hidden layer sizes of the MLPs."""
    members: int = 1
    """Number of MLPs of the ensemble; they share most of their weights."""
    dropout: float = 0.3
    """Share of the hidden values that training drops."""
    id_dropout: float = 0.1
    """Share of the IDs' embeddings that training drops."""
    wide_scale: float = 1.0
    """Factor of the linear weights of IDs: with Adam, they learn that many times as fast as embeddings."""
    shrinkage: float = 0.0
    """L2 penalty of each row of a table, over the whole training data: what occurs rarely stays near 0."""

    def __post_init__(self) -> None:
        for name in ("dropout", "id_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be in [0, 1).")
        if not self.layers or min(self.layers) < 1:
            raise ValueError(f"model.layers is {self.layers}; it must be one size or more, such as 128 64.")
        if self.members < 1:
            raise ValueError(f"model.members is {self.members}; it must be at least 1.")

    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model, with its tables on ``meta``."""
        tables = tables_on_meta(dataset, self.embedding_dim, std=self.table_std)
        return WideDeep(
            tables,
            dataset.number_edges or ((),) * dataset.num_dense,
            self.layers,
            num_outputs=max(1, dataset.num_classes),
            num_members=self.members,
            dropout=self.dropout,
            id_dropout=self.id_dropout,
            wide_scale=self.wide_scale,
            shrink=self._shrink(tables, dataset),
        )

    def _shrink(self, tables: EmbeddingBagCollection, dataset: "Dataset") -> list[float]:
        """Return the penalty of a lookup by feature: its row's, divided by how often a row is looked up."""
        if not self.shrinkage:
            return []
        lengths = {each.name: max(each.average_length, 1e-6) for each in dataset.features}
        num_samples = dataset.train.num_samples
        return [
            self.shrinkage * config.num_embeddings / (num_samples * sum(map(lengths.__getitem__, names)))
            for config in tables.embedding_bag_configs()
            for names in [config.feature_names]
            for _ in names
        ]
