"""Sharded embedding tables for recommender models, on PyTorch."""

from meshrec.modules import (
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from meshrec.optim.fused import fuse
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "BoundsCheckMode",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "fuse",
]
