"""Recommender models over an EmbeddingBagCollection or an EmbeddingCollection, sharded or not."""

from meshrec.models.deepfm import DeepFMModel, FMInteractionArch
from meshrec.models.din import DIN, InterestPooling
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
from meshrec.models.history_model import HistoryFeatures, HistoryModel
from meshrec.models.hstu import HSTU
from meshrec.models.item_frequency import ItemFrequency
from meshrec.models.multi_task import PLE, Mixture, MMoE, MultiTask, SharedBottom
from meshrec.models.next_item import judge_targets, sampled_softmax
from meshrec.models.sasrec import SASRec
from meshrec.models.tower_ranking import TowerRanking
from meshrec.models.two_tower import (
    BruteForceIndex,
    Retrieved,
    TowerArch,
    TowerVectors,
    TwoTower,
    TwoTowerClicks,
    TwoTowerTrain,
    in_batch_softmax,
)
from meshrec.models.wide_deep import WideDeep

__all__ = [
    "DIN",
    "DLRM",
    "DLRM_DCN",
    "HSTU",
    "PLE",
    "BruteForceIndex",
    "DLRMTrain",
    "DeepFMModel",
    "DenseArch",
    "FMInteractionArch",
    "HistoryFeatures",
    "HistoryModel",
    "InteractionArch",
    "InteractionDCNArch",
    "InterestPooling",
    "ItemFrequency",
    "MMoE",
    "Mixture",
    "MultiTask",
    "OverArch",
    "Retrieved",
    "SASRec",
    "SharedBottom",
    "SparseArch",
    "TowerArch",
    "TowerRanking",
    "TowerVectors",
    "TwoTower",
    "TwoTowerClicks",
    "TwoTowerTrain",
    "WideDeep",
    "in_batch_softmax",
    "judge_targets",
    "sampled_softmax",
]
