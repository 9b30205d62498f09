"""One tower of a two-tower model. Its package gives vectors of items for an index, or of queries for it."""

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

# B samples, I items, V width of vectors

Side = Literal["query", "item"]
_CHUNK = 8192


class Tower(nn.Module):
    """One tower with the tables that it reads; it shares the memory of the whole model.

    Args:
        model: a model that contains one `TwoTower`.
        side: which tower.

    Raises:
        ValueError: the model contains no `TwoTower`, or several.
    """

    def __init__(self, model: nn.Module, side: Side) -> None:
        super().__init__()
        found = [child for child in model.modules() if isinstance(child, TwoTower)]
        if len(found) != 1:
            raise ValueError(
                f"{type(model).__name__} has {len(found)} modules of meshrec.models.TwoTower, and a tower is "
                "one side of one. Export the whole model, or train a two-tower one."
            )
        (whole,) = found
        self.features = list(whole.query_features if side == "query" else whole.item_features)
        self.num_dense = whole.num_dense if side == "query" else 0
        self.arch = whole.query_arch if side == "query" else whole.item_arch
        collection = whole.embedding_bag_collection
        read = [
            replace(config, feature_names=own)
            for config in collection.embedding_bag_configs()
            if (own := [name for name in config.feature_names if name in self.features])
        ]
        self.embedding_bag_collection = EmbeddingBagCollection(
            read,
            device="meta",
            bounds_check=collection.bounds_check,
            output_dtype=collection.output_dtype,
        )
        holders = self.embedding_bag_collection.table_holders()[1]._modules
        for config, weight in collection.tables().values():
            if config.name in holders:
                holders[config.name].weight = weight

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute the vectors [B, V]."""
        embeddings = self.embedding_bag_collection(sparse).to_dict()
        own = [embeddings[name] for name in self.features]
        vectors: Tensor = self.arch([*own, dense] if self.num_dense else own)
        return vectors


class TowerQuery(nn.Module):
    """The query tower of a model of next items, with the vectors of all items beside it.

    Args:
        model: the model.
        ids_I: the IDs of the items, ascending; ``item_vectors`` has a row for each ID up to the largest.
    """

    item_vectors: Tensor

    @torch.no_grad()
    def __init__(self, model: TowerRanking, ids_I: Ints) -> None:
        super().__init__()
        self.tower = Tower(model, "query")
        vectors_IV = model.eval().item_vectors()
        rows = vectors_IV.new_zeros(int(ids_I[-1]) + 1, vectors_IV.shape[1])
        self.register_buffer("item_vectors", rows.index_copy(0, torch.from_numpy(ids_I), vectors_IV))

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute the vectors [B, V] of queries; keys that the tower does not read are ignored."""
        vectors: Tensor = self.tower(dense, sparse)
        return vectors


def vectors_of_catalogue(predictor: Predictor, catalogue: KeyedJaggedTensor) -> Floats:
    """Compute the vectors [I, V] of items from a catalogue with one sample per item, in its order."""
    found = []
    for start in range(0, max(catalogue.stride(), 1), _CHUNK):
        values, lengths = {}, {}
        for name in predictor.features:
            own = catalogue[name]
            offsets = own.offsets().long()[start : start + _CHUNK + 1]
            values[name] = own.values()[int(offsets[0]) : int(offsets[-1])].long()
            lengths[name] = offsets.diff()
        dense = torch.empty(len(lengths[predictor.features[0]]), 0)
        found.append(predictor(dense, values, lengths).numpy())
    return np.concatenate(found)


def vectors_of_rows(predictor: Predictor) -> Floats:
    """Compute the vectors [I, V] of all rows of the one feature that a tower reads.

    Raises:
        ValueError: the tower reads several features, or dense values.
    """
    if len(predictor.features) != 1 or predictor.num_dense or predictor.features[0] not in predictor.rows:
        raise ValueError(
            f"the tower reads {predictor.features} and {predictor.num_dense} dense values, so that its table "
            "does not list the items. Give their data: --items FILES."
        )
    (feature,) = predictor.features
    ids = torch.arange(predictor.rows[feature])
    lengths = torch.ones_like(ids)
    return np.concatenate(
        [
            predictor(torch.empty(len(some), 0), {feature: some}, {feature: own}).numpy()
            for some, own in zip(ids.split(_CHUNK), lengths.split(_CHUNK), strict=True)
        ]
    )


def vectors_of_items(predictor: Predictor, items: "Table") -> Floats:
    """Compute the vectors [I, V] of items whose raw values are the rows of a table.

    Raises:
        ValueError: the package takes no raw values, or the table lacks what it reads.
    """
    if predictor.raw is None:
        raise ValueError(
            f"{predictor.folder} takes ids alone: its run fitted no features. Ask the predictor for vectors."
        )
    for wrong in predictor.raw.wrong_columns(items.schema):
        raise ValueError(f"the items: {wrong}. Give them as they were in training.")
    found = []
    for start in range(0, max(items.num_rows, 1), _CHUNK):
        encoded = predictor.raw.encode(items.slice(start, _CHUNK))
        values, lengths = (
            {name: torch.from_numpy(own) for name, own in each.items()}
            for each in (encoded.values, encoded.lengths)
        )
        found.append(predictor(torch.from_numpy(encoded.dense), values, lengths).numpy())
    return np.concatenate(found)
