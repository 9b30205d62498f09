"""Export one tower of a two-tower model, and compute item vectors with an exported tower.

A two-tower model has a query tower and an item tower. Each maps features to a vector [V], and the score is a
function of both vectors. Items can be encoded in advance, so a server needs only the query tower.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from meshrec.data.samples import Floats, Ints
from meshrec.export.predictor import Predictor
from meshrec.models import TowerRanking
from meshrec.models.two_tower import TwoTower
from meshrec.modules import EmbeddingBagCollection
from meshrec.sparse import KeyedJaggedTensor

if TYPE_CHECKING:
    from pyarrow import Table

# B samples, I items, V vector width

Side = Literal["query", "item"]
# Maximum items per batch, which bounds activation memory.
_CHUNK = 8192


class Tower(nn.Module):
    """One tower of a two-tower model, and the tables it reads. Shares memory with the model.

    Args:
        model: model with exactly one `TwoTower`.
        side: tower to take, ``"query"`` or ``"item"``.

    Attributes:
        features: features which the tower reads.
        num_dense: number of dense columns which the tower reads; 0 for the item tower.

    Raises:
        ValueError: the model has no `TwoTower`, or several.
    """

    def __init__(self, model: nn.Module, side: Side) -> None:
        super().__init__()
        two_towers = [child for child in model.modules() if isinstance(child, TwoTower)]
        if len(two_towers) != 1:
            raise ValueError(
                f"{type(model).__name__} has {len(two_towers)} meshrec.models.TwoTower modules; a tower "
                "needs exactly one. Export the whole model, or train a two-tower model."
            )
        (whole,) = two_towers
        self.features = list(whole.query_features if side == "query" else whole.item_features)
        self.num_dense = whole.num_dense if side == "query" else 0
        self.arch = whole.query_arch if side == "query" else whole.item_arch
        collection = whole.embedding_bag_collection
        # Only this tower's tables and features, so that the package has no weights of the other tower.
        read = [
            replace(config, feature_names=names)
            for config in collection.embedding_bag_configs()
            if (names := [name for name in config.feature_names if name in self.features])
        ]
        self.embedding_bag_collection = EmbeddingBagCollection(
            read,
            device="meta",
            bounds_check=collection.bounds_check,
            output_dtype=collection.output_dtype,
        )
        # The collection is created without memory (on meta), and gets the weights of the model's tables.
        holders = self.embedding_bag_collection.table_holders()[1]._modules
        for config, weight in collection.tables().values():
            if config.name in holders:
                holders[config.name].weight = weight

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute vectors [B, V]."""
        embeddings = self.embedding_bag_collection(sparse).to_dict()
        inputs = [embeddings[name] for name in self.features]
        vectors: Tensor = self.arch([*inputs, dense] if self.num_dense else inputs)
        return vectors


class TowerQuery(nn.Module):
    """The query tower of a next-item model with two towers, and the vectors of all items as a buffer.

    The package does not need the item tower, because `RankedItems` ranks items by the rows of the buffer.

    Args:
        model: model which ranks items by two towers.
        ids_I: item IDs, int64, ascending.

    Attributes:
        item_vectors: item vectors, [largest ID + 1, V]. Row i is the vector of the item with ID i; it is 0 if
            i is not in ``ids_I``.
    """

    item_vectors: Tensor

    @torch.no_grad()
    def __init__(self, model: TowerRanking, ids_I: Ints) -> None:
        super().__init__()
        self.tower = Tower(model, "query")
        # Dropout would make the vectors random.
        vectors_IV = model.eval().item_vectors()
        rows = vectors_IV.new_zeros(int(ids_I[-1]) + 1, vectors_IV.shape[1])
        self.register_buffer("item_vectors", rows.index_copy(0, torch.from_numpy(ids_I), vectors_IV))

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute query vectors [B, V]. Features not read by the tower are ignored."""
        vectors: Tensor = self.tower(dense, sparse)
        return vectors


def catalogue_vectors(predictor: Predictor, catalogue: KeyedJaggedTensor) -> Floats:
    """Compute the vectors of all items with an exported item tower."""
    chunks = []
    # At least one chunk, so that an empty catalog gives an array of the right width.
    for start in range(0, max(catalogue.stride(), 1), _CHUNK):
        values, lengths = {}, {}
        for name in predictor.features:
            jagged = catalogue[name]
            offsets = jagged.offsets().long()[start : start + _CHUNK + 1]
            values[name] = jagged.values()[int(offsets[0]) : int(offsets[-1])].long()
            lengths[name] = offsets.diff()
        # Item towers read no dense values.
        dense = torch.empty(len(lengths[predictor.features[0]]), 0)
        chunks.append(predictor(dense, values, lengths).numpy())
    return np.concatenate(chunks)


def row_vectors(predictor: Predictor) -> Floats:
    """Compute a vector for every row of the item table, float32 [I, V], with an exported item tower.

    The tower must read a single feature, because then every row is an item.

    Raises:
        ValueError: the tower reads several features, dense values, or a feature without an ID limit.
    """
    if len(predictor.features) != 1 or predictor.num_dense or predictor.features[0] not in predictor.rows:
        raise ValueError(
            f"the tower reads {predictor.features} and {predictor.num_dense} dense values, so its table "
            "does not list the items. Pass item data: --items FILES."
        )
    (feature,) = predictor.features
    ids = torch.arange(predictor.rows[feature])
    lengths = torch.ones_like(ids)
    return np.concatenate(
        [
            predictor(torch.empty(len(chunk), 0), {feature: chunk}, {feature: counts}).numpy()
            for chunk, counts in zip(ids.split(_CHUNK), lengths.split(_CHUNK), strict=True)
        ]
    )


def vectors_of_raw_items(predictor: Predictor, items: "Table") -> Floats:
    """Compute item vectors, float32 [I, V], from raw values, with an exported item tower.

    Raises:
        ValueError: the package does not accept raw values, or the table lacks a column.
    """
    if predictor.raw is None:
        raise ValueError(
            f"{predictor.folder} only accepts ids: its run fitted no features. Call the predictor instead."
        )
    for wrong in predictor.raw.wrong_columns(items.schema):
        raise ValueError(f"the items: {wrong}. Pass the columns used in training.")
    chunks = []
    # At least one chunk, so that an empty table gives an array of the right width.
    for start in range(0, max(items.num_rows, 1), _CHUNK):
        encoded = predictor.raw.encode(items.slice(start, _CHUNK))
        values, lengths = (
            {name: torch.from_numpy(array) for name, array in arrays.items()}
            for arrays in (encoded.values, encoded.lengths)
        )
        chunks.append(predictor(torch.from_numpy(encoded.dense), values, lengths).numpy())
    return np.concatenate(chunks)
