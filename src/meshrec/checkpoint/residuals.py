"""The residuals of error feedback in a checkpoint, see ``distributed/error_feedback.py``.

They belong to the rank that sends gradients and to its columns, so they fit the plan under which they were
saved and no other. Under another plan a run begins without residuals, as a new run does.
"""

import logging
from collections.abc import Mapping

from torch import Tensor

from meshrec.checkpoint.manifest import RANDOM
from meshrec.distributed.error_feedback import ErrorFeedback
from meshrec.model_parallel import DistributedModelParallel

_log = logging.getLogger(__name__)
_RESIDUALS = f"{RANDOM}.residuals"


def residuals_of(entry: str, model: DistributedModelParallel, rank: int) -> dict[str, Tensor]:
    """Return the residuals of this rank, by the name that they have in a checkpoint."""
    return {
        f"{_prefix(entry, rank)}{path}.{name}": tensor
        for path, feedback in _feedback(model).items()
        for name, tensor in feedback.state().items()
    }


def saved_residuals(entry: str, rank: int, names: set[str]) -> list[str]:
    """Return which names of a checkpoint are residuals of this rank."""
    return [name for name in names if name.startswith(_prefix(entry, rank))]


def set_residuals(
    entry: str, model: DistributedModelParallel, rank: int, saved: Mapping[str, Tensor]
) -> None:
    """Replace the residuals of this rank by those of a checkpoint.

    Args:
        entry: the model's entry in the checkpoint.
        model: the model.
        rank: this rank.
        saved: what ``residuals_of`` returned; empty if the checkpoint has another plan.
    """
    prefix = _prefix(entry, rank)
    for path, feedback in _feedback(model).items():
        own = f"{prefix}{path}."
        feedback.load(
            {name.removeprefix(own): tensor for name, tensor in saved.items() if name.startswith(own)}
        )


def tell_that_feedback_begins_anew(entry: str) -> None:
    """Log that a checkpoint's residuals do not fit the plan of this run."""
    _log.warning(
        "the checkpoint's residuals of error feedback for %r belong to another plan or number of ranks, and "
        "are not loaded: feedback begins anew.",
        entry,
    )


def _prefix(entry: str, rank: int) -> str:
    return f"{_RESIDUALS}.{rank}.{entry}."


def _feedback(model: DistributedModelParallel) -> dict[str, ErrorFeedback]:
    tables = {path: getattr(module, "tables", None) for path, module in model.sharded_modules.items()}
    return {path: each.feedback for path, each in tables.items() if each is not None and each.feedback}
