"""Pipelined training: communication beside computation, and stages of a model."""

from meshrec.pipeline.lookahead import Lookahead
from meshrec.pipeline.stages import Staged
from meshrec.pipeline.train_pipeline import TrainPipeline

__all__ = ["Lookahead", "Staged", "TrainPipeline"]
