"""Next-item models in packages: the query of a history, and the items that it is compared with."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meshrec.data.faults import needs
from meshrec.data.samples import Floats, Ints
from meshrec.export.incremental import Encoder
from meshrec.models import DotProduct, HistoryModel
from meshrec.sparse import KeyedJaggedTensor

# B samples, I items, K recommendations, V width of vectors

ITEMS = "items.arrow"
"""The file of a package that lists the items."""
_WEIGHT, _NORMALISE, _SCALE, _ENCODER = b"weight", b"normalise", b"scale", b"encoder"


class NextItemQuery(nn.Module):
    """The part of a next-item model that encodes histories; it shares the memory of the whole model.

    Args:
        model: the model.

    Raises:
        ValueError: its score is no dot product of two vectors.
    """

    def __init__(self, model: HistoryModel) -> None:
        super().__init__()
        if not isinstance(model.similarity, DotProduct):
            raise ValueError(
                f"the scores of this model are a {type(model.similarity).__name__}, and a package gives one "
                "vector for each history. Train with the similarity dot or cosine."
            )
        self.similarity = model.similarity
        self._encoder = Encoder.of(model)
        self.model = copy.copy(model)
        self.model._modules = {name: each for name, each in model._modules.items() if name != "draws"}

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Return the query of each history, [B, V]; ``dense`` is ignored."""
        return self.model.query_vectors(sparse, check=False)

    @property
    def reads_times(self) -> bool:
        """Whether the model reads the times of the items."""
        return self.model.features.times is not None

    @property
    def encoder(self) -> Encoder | None:
        """The form of the model, if it continues from kept keys and values."""
        return self._encoder

    def table(self) -> str:
        """Return the name of the weight with the rows of the items."""
        ((_, weight),) = self.model.embedding_collection.tables().values()
        return next(name for name, each in self.named_parameters() if each is weight)


class Recommended(NamedTuple):
    """The best items of each sample, best first; fewer than K where no more were left."""

    items: list[list[Any]]
    scores: list[list[float]]


class RankedItems(NamedTuple):
    """The items that a package recommends."""

    ids_I: Ints
    """Their rows in the table, ascending."""
    values: Any
    """The value of each item, as an Arrow array."""
    weight: str
    """Name of the weight with the table."""
    normalise: bool
    """Whether rows are scaled to length 1."""
    scale: float
    """Factor that makes scores of dot products."""
    encoder: Encoder | None = None
    """The form of the model, if it continues from kept keys and values."""

    @staticmethod
    def of(query: NextItemQuery, ids_I: Ints, values: Any) -> "RankedItems":
        """Return the items of a model."""
        normalise, temperature = query.similarity.options
        return RankedItems(ids_I, values, query.table(), normalise, 1 / temperature, query.encoder)

    def vectors(self, weights: dict[str, Tensor]) -> Tensor:
        """Return the vectors [I, V] of the items by the weights of a package."""
        rows = weights[self.weight][torch.from_numpy(self.ids_I)].float()
        return nn.functional.normalize(rows, dim=1) if self.normalise else rows

    def best(
        self, queries_BV: Floats, vectors_IV: Tensor, k: int, hidden: list[tuple[Ints, Ints]]
    ) -> Recommended:
        """Return the K best items of each query, exactly.

        Args:
            queries_BV: the queries.
            vectors_IV: the items' vectors.
            k: the number of items.
            hidden: rows of items that must not be recommended, with the number of them for each sample.
        """
        scores_BI = torch.from_numpy(queries_BV) @ vectors_IV.T * self.scale
        for rows, lengths in hidden:
            at = np.searchsorted(self.ids_I, rows).clip(max=len(self.ids_I) - 1)
            is_item = self.ids_I[at] == rows
            of = np.repeat(np.arange(len(lengths)), lengths)
            scores_BI[torch.from_numpy(of[is_item]), torch.from_numpy(at[is_item])] = float("-inf")
        best, places = scores_BI.topk(min(k, len(self.ids_I)), dim=1)
        kept = best > float("-inf")
        return Recommended(
            [
                self.values.take(row[is_left].numpy()).to_pylist()
                for row, is_left in zip(places, kept, strict=True)
            ],
            [row[is_left].tolist() for row, is_left in zip(best, kept, strict=True)],
        )

    def save(self, folder: Path) -> None:
        """Write the items into a package."""
        pa, feather = needs("pyarrow", "data"), needs("pyarrow.feather", "data")
        about = {_WEIGHT: self.weight, _NORMALISE: str(int(self.normalise)), _SCALE: repr(self.scale)}
        if self.encoder is not None:
            about[_ENCODER] = self.encoder.to_json()
        table = pa.table({"id": self.ids_I, "value": self.values}).replace_schema_metadata(about)
        feather.write_feather(table, str(folder / ITEMS), compression="uncompressed")

    @staticmethod
    def load(folder: Path) -> "RankedItems":
        """Read what `save` wrote."""
        table = needs("pyarrow.feather", "data").read_table(str(folder / ITEMS), memory_map=False)
        about = table.schema.metadata
        return RankedItems(
            table["id"].to_numpy().copy(),  # torch wants it writable
            table["value"].combine_chunks(),
            about[_WEIGHT].decode(),
            about[_NORMALISE] == b"1",
            float(about[_SCALE]),
            Encoder.from_json(about[_ENCODER]) if _ENCODER in about else None,
        )
