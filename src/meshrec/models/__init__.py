"""Recommender models over an EmbeddingBagCollection, sharded or not."""

from meshrec.models.deepfm import DeepFM, FMInteractionArch
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
from meshrec.models.item_frequency import ItemFrequency
from meshrec.models.multi_task import PLE, Mixture, MMoE, MultiTask, SharedBottom
from meshrec.models.two_tower import (
    BruteForceIndex,
    Retrieved,
    TowerArch,
    TowerVectors,
    TwoTower,
    TwoTowerTrain,
    in_batch_softmax,
)

__all__ = [
    "DLRM",
    "DLRM_DCN",
    "PLE",
    "BruteForceIndex",
    "DLRMTrain",
    "DeepFM",
    "DenseArch",
    "FMInteractionArch",
    "InteractionArch",
    "InteractionDCNArch",
    "ItemFrequency",
    "MMoE",
    "Mixture",
    "MultiTask",
    "OverArch",
    "Retrieved",
    "SharedBottom",
    "SparseArch",
    "TowerArch",
    "TowerVectors",
    "TwoTower",
    "TwoTowerTrain",
    "in_batch_softmax",
]
