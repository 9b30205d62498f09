"""Recommender models over an EmbeddingBagCollection or EmbeddingCollection, sharded or not."""

from typing import TYPE_CHECKING

from meshrec.lazy import import_on_use

if TYPE_CHECKING:
    from meshrec.models.bert4rec import BERT4Rec
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
    from meshrec.models.gru4rec import GRU4Rec
    from meshrec.models.history_model import HistoryFeatures, HistoryModel, ItemCatalogue
    from meshrec.models.hstu import HSTU, AdvancedHistories, TokenCache
    from meshrec.models.hstu_ranker import HSTURanker, RankerFeatures
    from meshrec.models.item_frequency import ItemFrequency
    from meshrec.models.multi_task import PLE, Mixture, MMoE, MultiTask, SharedBottom
    from meshrec.models.next_item import (
        SampledSoftmax,
        TopItems,
        evaluate_targets,
        sampled_softmax,
        top_items,
    )
    from meshrec.models.sasrec import SASRec
    from meshrec.models.similarity import DotProduct, MixtureOfLogits, Similarity
    from meshrec.models.tower_ranking import TowerRanking
    from meshrec.models.two_tower import (
        BruteForceIndex,
        Retrieved,
        TowerArch,
        TowerVectors,
        TwoTower,
        TwoTowerClicks,
        in_batch_losses,
    )
    from meshrec.models.wide_deep import WideDeep

__all__ = [
    "DIN",
    "DLRM",
    "DLRM_DCN",
    "HSTU",
    "PLE",
    "AdvancedHistories",
    "BERT4Rec",
    "BruteForceIndex",
    "DLRMTrain",
    "DeepFMModel",
    "DenseArch",
    "DotProduct",
    "FMInteractionArch",
    "GRU4Rec",
    "HSTURanker",
    "HistoryFeatures",
    "HistoryModel",
    "InteractionArch",
    "InteractionDCNArch",
    "InterestPooling",
    "ItemCatalogue",
    "ItemFrequency",
    "MMoE",
    "Mixture",
    "MixtureOfLogits",
    "MultiTask",
    "OverArch",
    "RankerFeatures",
    "Retrieved",
    "SASRec",
    "SampledSoftmax",
    "SharedBottom",
    "Similarity",
    "SparseArch",
    "TokenCache",
    "TopItems",
    "TowerArch",
    "TowerRanking",
    "TowerVectors",
    "TwoTower",
    "TwoTowerClicks",
    "WideDeep",
    "evaluate_targets",
    "in_batch_losses",
    "sampled_softmax",
    "top_items",
]

import_on_use(__name__)
