"""Recommender models over an EmbeddingBagCollection, sharded or not."""

from meshrec.models.dlrm import (
    DLRM,
    DLRM_DCN,
    DenseArch,
    DLRMTrain,
    InteractionArch,
    InteractionDCNArch,
    OverArch,
    SparseArch,
)

__all__ = [
    "DLRM",
    "DLRM_DCN",
    "DLRMTrain",
    "DenseArch",
    "InteractionArch",
    "InteractionDCNArch",
    "OverArch",
    "SparseArch",
]
