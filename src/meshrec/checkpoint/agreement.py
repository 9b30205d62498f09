"""One outcome for all ranks: an error of one rank is raised on every rank, with the same message.

[Note: how errors reach every rank]

A rank that raises alone leaves the others waiting in their next collective until it times out. So an
operation that may fail on some ranks, such as reading a file or checking a batch, catches its error, tells it
to the others in a small collective, and then every rank raises:

- here, `agreed` exchanges the results or errors of a function;
- a lookup sends the status of its input with the sizes (distributed/input_dist.py), so that it needs no
  collective of its own;
- the train pipeline sends one word per batch in the background (pipeline/agreement.py);
- stages send an error in place of a value (pipeline/stages/messages.py);
- the trainer exchanges two flags per step (train/stopping.py), and only then reports or stores anything of
  the step.

A rank that dies cannot tell. The others notice its closed sockets or a timeout, and the launcher reports the
error of the rank that failed first (train/launch.py).
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from meshrec.comms.collectives import gather_objects
from meshrec.comms.mesh import Axis

T = TypeVar("T")

REMEDY = "Copy the checkpoint again from where it is whole, or load another one."
"""The advice in errors about damaged checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Checkpoints that are on disk remain as they were."""


class DamagedCheckpointError(CheckpointError):
    """The contents of a checkpoint's files are not what was written."""


def ranks_of(group: dist.ProcessGroup | None) -> Axis:
    """Return the ranks of a group as an axis: of the default group for None, or one rank if there is none."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Axis()
        group = dist.group.WORLD
        assert group is not None
    return Axis(size=group.size(), rank=group.rank(), group=group)


def agreed(axis: Axis, function: Callable[[], T], what: str) -> list[T]:
    """Return the results of ``function()`` on all ranks, or raise one error on all of them. Collective.

    Raises:
        ValueError: the failing ranks raised ValueError.
        DamagedCheckpointError: the failing ranks raised DamagedCheckpointError.
        CheckpointError: there was any other failure.
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
    """Combine the errors of ranks into one error that names the ranks."""
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
    """Return a single process's error as the kind of error that `agreed` raises."""
    if isinstance(error, ValueError | CheckpointError):
        return error
    return CheckpointError(f"{what} failed: {describe(error)}")


def describe(error: BaseException) -> str:
    """Return the message of an error, with its type unless it is one of ours."""
    if isinstance(error, ValueError | CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
