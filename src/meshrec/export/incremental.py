"""Queries of histories from kept keys and values, computed in Python with the weights of a package.

A package's compiled program takes whole histories. So the package also describes the form of its model, if
that model can continue from kept keys and values, and a process with Python builds the model again around the
package's weights.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.export.archive import PackageError
from meshrec.export.calling import call_with
from meshrec.models import (
    HSTU,
    AdvancedHistories,
    HistoryFeatures,
    ItemCatalogue,
    KeptTokens,
    SampledSoftmax,
)
from meshrec.modules import DataType, EmbeddingCollection, EmbeddingConfig
from meshrec.sparse import KeyedJaggedTensor

# B samples, N items of all histories


class Encoder(NamedTuple):
    """The form of a next-item model that continues from kept keys and values."""

    kind: str
    """The name of the model's class."""
    features: HistoryFeatures
    """The names of the model's features."""
    table: tuple[str, int, int]
    """The name of the item table, its number of rows, and their width."""
    sizes: dict[str, int]
    """The other arguments of the class that decide the shapes of its weights."""

    @staticmethod
    def of(model: nn.Module) -> "Encoder | None":
        """Return the form of a model; None if it keeps nothing, or its table is not one of float32 rows."""
        if not isinstance(model, HSTU):
            return None
        ((config, _),) = model.embedding_collection.tables().values()
        if config.storage is not None or config.keys is not None or config.data_type is not DataType.FP32:
            return None
        table = (config.name, config.num_embeddings, config.embedding_dim)
        return Encoder(HSTU.__name__, model.features, table, model.sizes)

    def to_json(self) -> str:
        """Return a text that `from_json` takes."""
        return json.dumps(self._asdict() | {"features": self.features._asdict()})

    @staticmethod
    def from_json(text: str | bytes) -> "Encoder":
        """Return the form that `to_json` wrote.

        Raises:
            PackageError: the text describes no model of this version.
        """
        try:
            said: dict[str, Any] = json.loads(text)
            found = Encoder(**{**said, "features": HistoryFeatures(**said["features"])})
        except (ValueError, TypeError, KeyError) as error:
            raise PackageError(
                f"the package describes its encoder wrongly ({error}). Export it again."
            ) from error
        if found.kind != HSTU.__name__:
            raise PackageError(
                f"the package's encoder is of the kind {found.kind!r}, which this version does not know. "
                "Export it again."
            )
        return found


class IncrementalQueries:
    """The queries of histories whose first tokens were encoded before.

    Args:
        encoder: the form of the model.
        weights: the weights of the package by name. They are read in every call, so that changes count.
        normalise: whether queries are scaled to length 1.

    Raises:
        PackageError: the weights are not those of such a model.
    """

    def __init__(self, encoder: Encoder, weights: Mapping[str, Tensor], *, normalise: bool) -> None:
        names, (table, num_rows, width) = encoder.features, encoder.table
        config = EmbeddingConfig(
            name=table, num_embeddings=num_rows, embedding_dim=width, feature_names=[*names[:2]]
        )
        meta = torch.device("meta")
        model = HSTU(
            EmbeddingCollection(tables=[config], device=meta),
            names,
            softmax=SampledSoftmax(similarity="cosine" if normalise else "dot"),
            items=ItemCatalogue(torch.zeros(1, dtype=torch.int64)),
            device=meta,
            **encoder.sizes,
        )
        del model.draws
        self._caller, self._weights = _Caller(model).eval(), weights
        shapes = {name: each.shape for name, each in self._caller.named_parameters()}
        if shapes != {name: each.shape for name, each in weights.items()}:
            raise PackageError(
                "the package describes an encoder whose weights are not those in it. Export it again."
            )
        self.features = [names.history, *([] if names.times is None else [names.times])]
        self.kept_shape = model.kept_shape

    @torch.inference_mode()
    def __call__(self, values: list[Tensor], lengths: list[Tensor], kept: KeptTokens) -> AdvancedHistories:
        """Return the queries of histories, and what can be kept of them; see `HSTU.advance`.

        Args:
            values: the values [N] of each of ``features``, sample by sample.
            lengths: the number of values of each sample, int64 [B], for each feature.
            kept: what was kept of the beginnings of these histories, with these weights.

        Raises:
            ValueError: a history is too long, or an ID lies outside the table.
        """
        sparse = KeyedJaggedTensor(
            self.features, torch.cat(values), lengths=torch.cat(lengths), stride=len(kept.lengths_B)
        )
        found: AdvancedHistories = call_with(self._caller, self._weights, sparse, kept)
        return found


class _Caller(nn.Module):
    """A module whose forward is the model's ``advance``, with the names that packages give weights."""

    def __init__(self, model: HSTU) -> None:
        super().__init__()
        self.model = model

    def forward(self, sparse: KeyedJaggedTensor, kept: KeptTokens) -> AdvancedHistories:
        return self.model.advance(sparse, kept)
