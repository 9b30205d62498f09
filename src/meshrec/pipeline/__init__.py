"""Pipelined training: exchange IDs and embeddings for later batches while the current batch computes."""

from typing import TYPE_CHECKING

from meshrec.lazy import import_on_use

if TYPE_CHECKING:
    from meshrec.pipeline.lookahead import Lookahead
    from meshrec.pipeline.train_pipeline import TrainPipeline
    from meshrec.pipeline.update import Update

__all__ = ["Lookahead", "TrainPipeline", "Update"]

import_on_use(__name__)
