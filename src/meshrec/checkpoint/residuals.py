"""Save and load error feedback residuals: rounding errors in sent gradients, to be added to later gradients.

See ``distributed/error_feedback.py``. Residuals belong to the columns sent by a rank, so they can only be
loaded under the plan under which they were saved. Under another plan, a run starts without residuals, like a
new run.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from meshrec.checkpoint.manifest import RANDOM
from meshrec.model_parallel import DistributedModelParallel

if TYPE_CHECKING:
    from meshrec.distributed.error_feedback import ErrorFeedback

_log = logging.getLogger(__name__)
# Below a reserved entry name, so that no entry of the state has the same tensor names.
_RESIDUALS = f"{RANDOM}.residuals"


def residuals_of(entry: str, model: DistributedModelParallel, rank: int) -> dict[str, Tensor]:
    """Return this rank's error feedback residuals, by tensor name in the checkpoint.

    Args:
        entry: model name in the training state.
        model: sharded model.
        rank: this rank.
    """
    return {
        f"{_prefix(entry, rank)}{path}.{name}": tensor
        for path, feedback in _feedback_by_module(model).items()
        for name, tensor in feedback.state().items()
    }


def saved_residuals(entry: str, rank: int, names: set[str]) -> list[str]:
    """Return the names of a rank's residuals among tensor names in a checkpoint.

    Args:
        entry: model name in the training state.
        rank: rank that saved the residuals.
        names: tensor names to select from.
    """
    return [name for name in names if name.startswith(_prefix(entry, rank))]


def set_residuals(
    entry: str, model: DistributedModelParallel, rank: int, saved: Mapping[str, Tensor]
) -> None:
    """Replace this rank's residuals with saved residuals.

    Args:
        entry: model name in the training state.
        model: sharded model.
        rank: this rank.
        saved: residuals by tensor name in the checkpoint; empty if the checkpoint has another plan.
    """
    prefix = _prefix(entry, rank)
    for path, feedback in _feedback_by_module(model).items():
        path_prefix = f"{prefix}{path}."
        # Also with nothing saved, which drops the residuals of the steps before the load.
        feedback.load(
            {
                name.removeprefix(path_prefix): tensor
                for name, tensor in saved.items()
                if name.startswith(path_prefix)
            }
        )


def warn_residuals_dropped(entry: str) -> None:
    """Log a warning that the checkpoint's residuals belong to another plan and are not loaded."""
    _log.warning(
        "the checkpoint's error feedback residuals for %r belong to another plan or world size, and "
        "are not loaded: error feedback restarts from zero.",
        entry,
    )


def _prefix(entry: str, rank: int) -> str:
    """Return the prefix of the names of a rank's residuals in a checkpoint."""
    # The dots keep rank 1 apart from rank 10, and an entry from entries with longer names.
    return f"{_RESIDUALS}.{rank}.{entry}."


def _feedback_by_module(model: DistributedModelParallel) -> "dict[str, ErrorFeedback]":
    """Return the error feedback of a model's sharded modules, by module path."""
    tables = {path: getattr(module, "tables", None) for path, module in model.sharded_modules.items()}
    return {
        path: module_tables.feedback
        for path, module_tables in tables.items()
        if module_tables is not None and module_tables.feedback
    }
