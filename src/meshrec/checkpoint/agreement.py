"""One outcome for all ranks: what fails on one of them is raised on each, with the same words."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from meshrec.comms.collectives import gather_objects
from meshrec.plan.mesh import Axis

T = TypeVar("T")

REMEDY = "Copy the checkpoint again from where it is whole, or load another one."
"""What errors of damaged checkpoints tell the user to do."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; what is on disk from before is untouched."""


class DamagedCheckpointError(CheckpointError):
    """What a checkpoint's files hold is not what was written."""


def ranks_of(group: dist.ProcessGroup | None) -> Axis:
    """The ranks of a group (None: the default group) as an axis; one rank where there is no group at all."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Axis()
        group = dist.group.WORLD
        assert group is not None
    return Axis(size=group.size(), rank=group.rank(), group=group)


def agreed(axis: Axis, function: Callable[[], T], what: str) -> list[T]:
    """``function()`` of every rank. Collective: all ranks get all results, or raise the same error.

    Raises:
        ValueError: when that is what the failing ranks raised.
        DamagedCheckpointError: likewise.
        CheckpointError: for every other failure.
    """
    outcome: tuple[Any, Exception | None]
    try:
        outcome = (function(), None)
    except Exception as error:
        if axis.size == 1:
            raise as_checkpoint_error(error, what) from error
        outcome = (None, error)
    outcomes = gather_objects(outcome, axis, what)
    errors = {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}
    if errors:
        raise combined(errors, what)
    return [result for result, _ in outcomes]


def combined(errors: dict[int, Exception], what: str) -> Exception:
    """One error that says what failed on which rank."""
    texts = {rank: describe(error) for rank, error in errors.items()}
    if len(set(texts.values())) == 1:
        ranks = ", ".join(map(str, texts))
        text = f"{next(iter(texts.values()))} (rank {ranks})"
    else:
        text = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    for kind in (ValueError, DamagedCheckpointError):
        if all(isinstance(error, kind) for error in errors.values()):
            return kind(text)
    return CheckpointError(f"{what} failed: {text}")


def as_checkpoint_error(error: Exception, what: str) -> Exception:
    """The same, of one process."""
    if isinstance(error, ValueError | CheckpointError):
        return error
    return CheckpointError(f"{what} failed: {describe(error)}")


def describe(error: BaseException) -> str:
    """The message, with the kind of error where it is not one of ours."""
    if isinstance(error, ValueError | CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
