"""Encode only the new items in a user's history, with attention keys and values cached for the earlier items.

A next-item model encodes a history as a query vector. The compiled program in a package always takes whole
histories. If the model supports a cache of attention keys and values (a KV cache), the package also describes
the architecture. Python then rebuilds the model around the package weights, and continues from the cache.
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
    SampledSoftmax,
    TokenCache,
)
from meshrec.modules import DataType, EmbeddingCollection, EmbeddingConfig
from meshrec.sparse import KeyedJaggedTensor

# B samples, N items in all histories


class EncoderSpec(NamedTuple):
    """Description from which a next-item model with a KV cache can be rebuilt.

    Attributes:
        kind: model class name.
        features: the model's feature names.
        table: name, row count and width of the item table.
        sizes: other constructor arguments that determine weight shapes.
        scores_new_users: whether users without history get fixed item scores; see `HistoryModel`. Their query
            vector is then 0.
        has_repeats: whether the model has a `meshrec.models.repeats.RepeatScores`. Query vectors do not
            depend on it, but the package has its weights.
    """

    kind: str
    features: HistoryFeatures
    table: tuple[str, int, int]
    sizes: dict[str, int]
    scores_new_users: bool = False
    has_repeats: bool = False

    @staticmethod
    def of(model: nn.Module) -> "EncoderSpec | None":
        """Describe a model's architecture.

        Returns:
            The description, or None if the model does not support a KV cache, or the item table is hashed,
            quantized or in a file.
        """
        if not isinstance(model, HSTU):
            return None
        ((config, _),) = model.embedding_collection.tables().values()
        # `IncrementalQueries` rebuilds the table from name and size alone, as an fp32 table in memory.
        if config.storage is not None or config.keys is not None or config.data_type is not DataType.FP32:
            return None
        table = (config.name, config.num_embeddings, config.embedding_dim)
        has_repeats = model.repeats is not None
        return EncoderSpec(
            HSTU.__name__, model.features, table, model.sizes, model.scores_new_users, has_repeats
        )

    def to_json(self) -> str:
        """Return the architecture as JSON, for `from_json`."""
        return json.dumps(self._asdict() | {"features": self.features._asdict()})

    @staticmethod
    def from_json(text: str | bytes) -> "EncoderSpec":
        """Create an architecture from `to_json` output.

        Raises:
            PackageError: the JSON is damaged, or describes a model class which this version does not support.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            encoder = EncoderSpec(**{**values, "features": HistoryFeatures(**values["features"])})
        except (ValueError, TypeError, KeyError) as error:
            raise PackageError(
                f"the package's encoder description is invalid ({error}). Export it again."
            ) from error
        if encoder.kind != HSTU.__name__:
            raise PackageError(
                f"the package's encoder is a {encoder.kind!r}, which this version does not support. "
                "Export it again."
            )
        return encoder


class IncrementalQueries:
    """Query encoder for histories, with a KV cache for the items encoded before.

    Args:
        encoder: model architecture.
        weights: package weights by name. They are read in every call, so later changes have an effect.
        normalise: whether query vectors are scaled to length 1.

    Attributes:
        features: names of the features to pass in every call: the history, and the times if the model reads
            them.
        cache_shape: number of layers, and the width of the cached keys and values per item and layer.

    Raises:
        PackageError: the weights do not match the architecture.
    """

    def __init__(self, encoder: EncoderSpec, weights: Mapping[str, Tensor], *, normalise: bool) -> None:
        names, (table, num_rows, width) = encoder.features, encoder.table
        # The first two features, history and target item, share the item table.
        config = EmbeddingConfig(
            name=table, num_embeddings=num_rows, embedding_dim=width, feature_names=[*names[:2]]
        )
        # On meta, without memory: every call replaces all weights by the package's.
        meta = torch.device("meta")
        model = HSTU(
            EmbeddingCollection(tables=[config], device=meta),
            names,
            softmax=SampledSoftmax(similarity="cosine" if normalise else "dot", repeats=encoder.has_repeats),
            # A single item stands for the catalog, because query vectors do not depend on the items.
            items=ItemCatalogue(
                torch.zeros(1, dtype=torch.int64),
                new_user_scores_I=torch.zeros(1) if encoder.scores_new_users else None,
            ),
            device=meta,
            **encoder.sizes,
        )
        # Only training uses the sampler, and packages do not store it.
        del model.draws
        if encoder.scores_new_users:
            del model.new_user_scores
        self._caller, self._weights = _AdvanceModule(model).eval(), weights
        state = (*self._caller.named_parameters(), *self._caller.named_buffers())
        shapes = {name: tensor.shape for name, tensor in state}
        # Otherwise call_with would silently leave weights on meta.
        if shapes != {name: weight.shape for name, weight in weights.items()}:
            raise PackageError(
                "the package's encoder description does not match its weights. Export it again."
            )
        self.features = [names.history, *([] if names.times is None else [names.times])]
        self.cache_shape = model.cache_shape

    @torch.inference_mode()
    def __call__(self, values: list[Tensor], lengths: list[Tensor], cache: TokenCache) -> AdvancedHistories:
        """Compute the query vectors of B histories, encoding only the items that are not cached; see
        `HSTU.advance`.

        Args:
            values: for every feature in ``features``, the values [N] of the whole histories, sample by
                sample.
            lengths: for every feature, the number of values per history, int64 [B].
            cache: keys and values for the first items in every history, computed with the current weights. It
                may cover no items.

        Returns:
            Query vectors, and the cache to pass when the histories have grown.

        Raises:
            ValueError: a history is too long, or an ID is outside the table.
        """
        sparse = KeyedJaggedTensor(
            self.features, torch.cat(values), lengths=torch.cat(lengths), stride=len(cache.lengths_B)
        )
        advanced: AdvancedHistories = call_with(self._caller, self._weights, sparse, cache)
        return advanced


class _AdvanceModule(nn.Module):
    """Module whose forward is ``HSTU.advance``, and whose weights are named as in packages."""

    def __init__(self, model: HSTU) -> None:
        super().__init__()
        self.model = model

    def forward(self, sparse: KeyedJaggedTensor, cache: TokenCache) -> AdvancedHistories:
        return self.model.advance(sparse, cache)
