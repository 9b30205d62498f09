"""Checkpoint errors, and a helper that raises the same error on every rank if a call fails on some rank.

See [Note: how errors reach every rank] in comms/agreement.py.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from meshrec.comms.collectives import gather_objects
from meshrec.comms.failures import as_agreed, sendable
from meshrec.comms.mesh import Axis

T = TypeVar("T")

REMEDY = "Copy the checkpoint again from where it is whole, or load another one."
"""Advice appended to errors about damaged checkpoints."""


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written or read. Checkpoints already on disk stay unchanged."""


class DamagedCheckpointError(CheckpointError):
    """Raised if checkpoint files are missing, or their bytes differ from the bytes written."""


def ranks_of(group: dist.ProcessGroup | None) -> Axis:
    """Return the ranks in a process group as an `Axis` (group, size, and this rank's index in the group).

    If ``group`` is None, return the default group, or a single rank if torch.distributed is not initialized.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Axis()
        group = dist.group.WORLD
        assert group is not None
    return Axis(size=group.size(), rank=group.rank(), group=group)


def agreed(axis: Axis, function: Callable[[], T], action: str) -> list[T]:
    """Call ``function()`` on every rank, and return the results from all ranks. Collective.

    If ``function`` raises on at least one rank, every rank raises the same error. No rank then waits in a
    later collective for a rank that has failed.

    Args:
        axis: participating ranks.
        function: function without arguments, with a picklable result.
        action: description for error messages, such as "writing the manifest".

    Returns:
        Results in rank order.

    Raises:
        ValueError: all failing ranks raised ValueError.
        DamagedCheckpointError: all failing ranks raised DamagedCheckpointError.
        CheckpointError: any other failure.
    """
    outcome: tuple[Any, Exception | None]
    try:
        outcome = (function(), None)
    except Exception as error:
        if axis.size == 1:
            # A single rank needs to inform nobody about the error.
            raise as_checkpoint_error(error, action) from error
        outcome = (None, _sendable(error))
    # Ranks without an error take part as well, because the exchange is collective.
    outcomes = gather_objects(outcome, axis, action)
    errors = {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}
    if errors:
        raise combined_error(errors, action)
    return [result for result, _ in outcomes]


def combined_error(errors: dict[int, Exception], action: str) -> Exception:
    """Combine the errors of several ranks into a single error whose message names the ranks.

    Returns:
        A ValueError or DamagedCheckpointError if all errors have this type, else a CheckpointError.
    """
    # Equal messages are printed once. Usually all ranks fail for the same reason.
    texts = {rank: describe(error) for rank, error in errors.items()}
    if len(set(texts.values())) == 1:
        ranks = ", ".join(map(str, texts))
        text = f"{next(iter(texts.values()))} (rank {ranks})"
    else:
        text = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    # The type must survive: ``load_latest`` tries an older checkpoint only after a DamagedCheckpointError.
    for kind in (ValueError, DamagedCheckpointError):
        if all(isinstance(error, kind) for error in errors.values()):
            return as_agreed(kind(text))
    return as_agreed(CheckpointError(f"{action} failed: {text}"))


def as_checkpoint_error(error: Exception, action: str) -> Exception:
    """Convert an error to a CheckpointError, unless it is a ValueError or CheckpointError already."""
    if isinstance(error, ValueError | CheckpointError):
        return error
    return CheckpointError(f"{action} failed: {describe(error)}")


def _sendable(error: Exception) -> Exception:
    """Convert an error to a type that every rank can unpickle; see ``comms.agreement.gather_errors``."""
    if isinstance(error, ValueError | CheckpointError):
        return sendable(error, (DamagedCheckpointError, CheckpointError, ValueError))
    return CheckpointError(describe(error))


def describe(error: BaseException) -> str:
    """Return an error's message, for example "OSError: no space left".

    The type name is left out for ValueError and CheckpointError, whose messages are complete sentences.
    """
    if isinstance(error, ValueError | CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
