"""Pipelined training: exchange IDs and embeddings for later batches while the current batch computes."""

from typing import TYPE_CHECKING

from meshrec.lazy import importer
from meshrec.pipeline.lookahead import Lookahead
from meshrec.pipeline.train_pipeline import TrainPipeline
from meshrec.pipeline.update import Update

if TYPE_CHECKING:
    from meshrec.stages import Staged

__all__ = ["Lookahead", "Staged", "TrainPipeline", "Update"]

# The old module path, for one release.
__getattr__ = importer(__name__, {"meshrec.stages": ["Staged"]})
