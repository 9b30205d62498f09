"""Output shapes for the operators on scores (fake kernels), for tracing."""

import torch
from torch import Tensor

import meshrec.ops.scores.naive  # noqa: F401 - the ops must exist before fakes are registered for them


def _rank_scores(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result shapes of ``rank_scores``."""
    num_above, num_equal, log_sums = (scores.new_empty(scores.shape[0]) for _ in range(3))
    return num_above, num_equal, log_sums


def _merge_top_k(scores: Tensor, ids: Tensor, best_scores: Tensor, best_ids: Tensor) -> None:
    """Return nothing, as ``merge_top_k`` does."""


torch.library.register_fake("meshrec::rank_scores", _rank_scores)
torch.library.register_fake("meshrec::merge_top_k", _merge_top_k)
