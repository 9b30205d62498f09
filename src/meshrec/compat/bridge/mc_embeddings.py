"""TorchRec's embedding collections with managed collisions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshrec.compat.bridge.managed_collisions import ManagedCollisionCollection
from meshrec.compat.bridge.sparse import KeyedJaggedTensor
from meshrec.modules import BaseEmbeddingConfig, EmbeddingBagCollection, EmbeddingCollection

Collection = EmbeddingBagCollection | EmbeddingCollection


def return_remapped_lengths_as_mask(features: KeyedJaggedTensor) -> torch.Tensor:
    """Return a mask of non-empty bags, bool [B]."""
    return features.lengths().bool()


def return_custom_metadata(runtime_meta: torch.Tensor) -> torch.Tensor:
    """Return the argument. Graphs from TorchRec call this function by name."""
    return runtime_meta


class BaseManagedCollisionEmbeddingCollection(nn.Module):
    """Embedding collection with an ID remapping step before the lookup.

    The collection runs on a single rank, because ranks would assign different rows to the same ID. To shard,
    use tables with hashed keys (``meshrec.Hashed``).

    Args:
        embedding_module: embedding collection.
        managed_collision_collection: managed collisions for the same tables.
        return_remapped_features: whether `forward` also returns the remapped features.
        allow_in_place_embed_weight_update: ignored.
    """

    def __init__(
        self,
        embedding_module: Collection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__()
        configs: Sequence[BaseEmbeddingConfig]
        if isinstance(embedding_module, EmbeddingBagCollection):
            configs = embedding_module.embedding_bag_configs()
        else:
            configs = embedding_module.embedding_configs()
        if list(configs) != list(managed_collision_collection.embedding_configs()):
            raise ValueError(
                "the collection and the managed collisions must have the same tables, got "
                f"{[config.name for config in configs]} and "
                f"{[config.name for config in managed_collision_collection.embedding_configs()]}."
            )
        self._managed_collision_collection = managed_collision_collection
        self._embedding_module = embedding_module
        self._return_remapped_features = return_remapped_features

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[Any, KeyedJaggedTensor | None]:
        """Return the embeddings, and the remapped features or None."""
        # DistributedModelParallel has replaced the collection by a sharded one.
        if not isinstance(self._embedding_module, Collection):
            raise ValueError(
                "managed collisions are not sharded: each rank would give other rows to the same IDs. Take "
                "tables with hashed keys, EmbeddingBagConfig(keys=meshrec.Hashed(max_rows=...))."
            )
        features = self._managed_collision_collection(features, mutate_miss_lengths=mutate_miss_lengths)
        embeddings = self._embedding_module(features)
        # Discards the evicted rows, which otherwise accumulate. Rows keep their weights, as in TorchRec.
        self._managed_collision_collection.evict()
        return embeddings, features if self._return_remapped_features else None

    def lookup_remapped_lengths_mask(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return a mask of non-empty remapped bags, bool."""
        remapped: KeyedJaggedTensor = self._managed_collision_collection(features)
        return remapped.lengths().to(torch.bool)


class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """`EmbeddingCollection` with managed collisions; see `BaseManagedCollisionEmbeddingCollection`."""

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(embedding_collection, managed_collision_collection, return_remapped_features)

    @property
    def _embedding_collection(self) -> nn.Module:
        return self._embedding_module


class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """`EmbeddingBagCollection` with managed collisions; see `BaseManagedCollisionEmbeddingCollection`."""

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(embedding_bag_collection, managed_collision_collection, return_remapped_features)

    @property
    def _embedding_bag_collection(self) -> nn.Module:
        return self._embedding_module
