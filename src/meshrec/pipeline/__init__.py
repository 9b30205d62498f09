"""Pipelined training: communication during computation, and models cut into stages."""

from meshrec.pipeline.lookahead import Lookahead
from meshrec.pipeline.stages import Staged
from meshrec.pipeline.train_pipeline import TrainPipeline
from meshrec.pipeline.update import Update

__all__ = ["Lookahead", "Staged", "TrainPipeline", "Update"]
