"""Checkpoint errors, and collective calls that raise the same error on all ranks.

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
    """A checkpoint could not be written or read. Checkpoints already on disk are unchanged."""


class DamagedCheckpointError(CheckpointError):
    """Checkpoint files are missing, or differ from the bytes written."""


def ranks_of(group: dist.ProcessGroup | None) -> Axis:
    """Convert a process group to an `Axis`.

    None stands for the default group, or for a single rank if torch.distributed is not initialized.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Axis()
        group = dist.group.WORLD
        assert group is not None
    return Axis(size=group.size(), rank=group.rank(), group=group)


def agreed(axis: Axis, function: Callable[[], T], action: str) -> list[T]:
    """Call ``function()`` on every rank, and return the results of all ranks. Collective.

    If ``function`` raises on some rank, all ranks raise the same error.

    Args:
        axis: participating ranks.
        function: function without arguments; its result must be picklable.
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
            # Nobody waits for a single rank, so the error needs no exchange.
            raise as_checkpoint_error(error, action) from error
        outcome = (None, _sendable(error))
    outcomes = gather_objects(outcome, axis, action)
    errors = {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}
    if errors:
        raise combined(errors, action)
    return [result for result, _ in outcomes]


def combined(errors: dict[int, Exception], action: str) -> Exception:
    """Combine rank errors into a single error naming the ranks."""
    texts = {rank: describe(error) for rank, error in errors.items()}
    if len(set(texts.values())) == 1:
        ranks = ", ".join(map(str, texts))
        text = f"{next(iter(texts.values()))} (rank {ranks})"
    else:
        text = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    for kind in (ValueError, DamagedCheckpointError):
        if all(isinstance(error, kind) for error in errors.values()):
            return as_agreed(kind(text))
    return as_agreed(CheckpointError(f"{action} failed: {text}"))


def as_checkpoint_error(error: Exception, action: str) -> Exception:
    """Convert an error to an error type raised by `agreed`."""
    if isinstance(error, ValueError | CheckpointError):
        return error
    return CheckpointError(f"{action} failed: {describe(error)}")


def _sendable(error: Exception) -> Exception:
    """Convert an error to a type every rank can unpickle; see ``comms.agreement.gather_errors``."""
    if isinstance(error, ValueError | CheckpointError):
        return sendable(error, (DamagedCheckpointError, CheckpointError, ValueError))
    return CheckpointError(describe(error))


def describe(error: BaseException) -> str:
    """Return an error's message, after the type name unless it is a ValueError or CheckpointError."""
    if isinstance(error, ValueError | CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
