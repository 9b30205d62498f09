"""Embedding collections and their configurations."""

from meshrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    BoundsCheckMode,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from meshrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

__all__ = [
    "BaseEmbeddingConfig",
    "BoundsCheckMode",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "PoolingType",
]
