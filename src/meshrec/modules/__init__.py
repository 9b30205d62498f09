"""Embedding collections and their configurations, and dense modules for recommendation models."""

from typing import TYPE_CHECKING

from meshrec.lazy import import_on_use

if TYPE_CHECKING:
    from meshrec.modules.activation import SwishLayerNorm
    from meshrec.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet
    from meshrec.modules.deepfm import DeepFM, FactorizationMachine
    from meshrec.modules.embedding_configs import (
        BaseEmbeddingConfig,
        BoundsCheckMode,
        DataType,
        EmbeddingBagConfig,
        EmbeddingConfig,
        PoolingType,
        can_name_table,
    )
    from meshrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from meshrec.modules.feature_processor import (
        FeatureProcessedEmbeddingBagCollection,
        FeatureProcessor,
        FeatureProcessorsCollection,
        PositionWeightedModule,
        PositionWeightedModuleCollection,
    )
    from meshrec.modules.fusing import fuse
    from meshrec.modules.hstu import HSTUBlock, Tokens, cache_shape, extend_all
    from meshrec.modules.interaction import DotInteraction
    from meshrec.modules.linear import Linear
    from meshrec.modules.members import MemberLinear, MemberMLP
    from meshrec.modules.mlp import MLP, Perceptron
    from meshrec.modules.numeric import NumberEmbedding, PeriodicEmbedding, PiecewiseLinear
    from meshrec.modules.regroup import KTRegroupAsDict

__all__ = [
    "MLP",
    "BaseEmbeddingConfig",
    "BoundsCheckMode",
    "CrossNet",
    "DataType",
    "DeepFM",
    "DotInteraction",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FactorizationMachine",
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessor",
    "FeatureProcessorsCollection",
    "HSTUBlock",
    "KTRegroupAsDict",
    "Linear",
    "LowRankCrossNet",
    "LowRankMixtureCrossNet",
    "MemberLinear",
    "MemberMLP",
    "NumberEmbedding",
    "Perceptron",
    "PeriodicEmbedding",
    "PiecewiseLinear",
    "PoolingType",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
    "SwishLayerNorm",
    "Tokens",
    "VectorCrossNet",
    "cache_shape",
    "can_name_table",
    "extend_all",
    "fuse",
]

import_on_use(__name__)
