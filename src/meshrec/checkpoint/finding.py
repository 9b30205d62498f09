"""Find the checkpoint that a path stands for: a checkpoint, a checkpoint folder, or a run."""

import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

from meshrec.checkpoint.manifest import MANIFEST
from meshrec.durable import DamageError, read_regular, unsealed

_log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Run subfolder with the last checkpoints, from which training resumes."""
BEST = "best"
"""Run subfolder with the best weights on validation data."""
HOLD = "hold.json"
"""File in the folder of a run that holds back deltas; has the fields of `Hold`."""
_MAX_HOLD_BYTES = 1 << 20
# Folder names accepted for reading, with any number of digits.
_NAME = re.compile(r"step-([0-9]+)")
# Folder names written by `CheckpointManager`. Only these may be deleted as old checkpoints.
_MANAGED_NAME = re.compile(r"step-([0-9]{10,})")


class Hold(NamedTuple):
    """Since when and why a run holds back its weights from servers, or rolls them back.

    During a hold, training continues. A roll-back returns run and servers to an earlier checkpoint, and ends
    training. All later attributes are those of a roll-back, and None during a hold.

    Attributes:
        step: step of the last checkpoint before the hold, or of the checkpoint to return to; None: there is
            none.
        reason: the alarm that began the hold.
        position: position in the stream at the alarm.
        delta: number of the delta that takes servers back; None: it is not published yet.
        choice: choice of the user about the records up to ``position``, "reread" or "skip"; None: none yet.
    """

    step: int | None
    reason: str
    position: dict[str, Any] | None = None
    delta: int | None = None
    choice: str | None = None

    @property
    def is_roll_back(self) -> bool:
        """Whether the run returns to the checkpoint."""
        return self.position is not None

    @property
    def text(self) -> str:
        """Sentence for the user."""
        if self.is_roll_back:
            return f"The run returns to step {self.step:,}, and stops: {self.reason}"
        return f"Deltas are held back: {self.reason}"


def read_hold(run: str | Path) -> Hold | None:
    """Return since when and why a run holds back its weights; None if it does not.

    Raises:
        ValueError: the file cannot be read, or is damaged.
    """
    path = Path(run) / HOLD
    try:
        values = unsealed(read_regular(path, _MAX_HOLD_BYTES), HOLD, required=True)
        return Hold(**values)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, DamageError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Name a checkpoint instead of the run.") from error


def step_name(step: int) -> str:
    """Return the folder name used by `CheckpointManager` for a step: "step-0000000100" for step 100."""
    return f"step-{step:010d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder named by `step_name`; None for other names."""
    match = _MANAGED_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def find_checkpoint(path: str | Path, *, step: int | None = None, last: bool = False) -> Path:
    """Return the finished checkpoint to load for ``path``.

    If ``path`` is a checkpoint, return it. If it is a folder with checkpoints, return the newest. If it is a
    run folder, return its reported weights: the best on validation data, or the last if the run
    has no validation data. While the run holds back its weights, these are the last from before. The refit
    on all rows (``--final all``) is the run ``PATH/final``.

    Args:
        path: checkpoint, checkpoint folder, or run folder.
        step: return this step's checkpoint instead.
        last: for a run folder, return the last checkpoint instead of the best, also if it is held back.

    Raises:
        ValueError: no checkpoint matches. The message lists existing steps.
    """
    path = Path(path)
    # A checkpoint is returned unchecked. Reading the manifest reports damage with a better message.
    if (path / MANIFEST).exists() and step is None:
        return path
    last_steps, best = _checkpoints_by_step(path)
    # If both folders have a step, prefer `checkpoints`, from which training can resume.
    by_step = {**best, **last_steps}
    if not by_step:
        raise ValueError(
            f"{path.resolve()} has no finished checkpoint. Pass a checkpoint, a folder with checkpoints, or "
            "a run."
        )
    if step is not None:
        if step not in by_step:
            raise ValueError(
                f"{path} has no finished checkpoint of step {step}; available steps: {sorted(by_step)}."
            )
        return by_step[step]
    candidates = last_steps if (last and last_steps) or not best else best
    hold = None if last else read_hold(path)
    if hold is not None:
        end = 0 if hold.step is None else hold.step + 1
        candidates = {number: checkpoint for number, checkpoint in candidates.items() if number < end}
        if not candidates:
            raise ValueError(
                f"{path} holds back its weights ({hold.reason}), and has no checkpoint from before. Wait for "
                f"the end of the alarm, or name a step of {sorted(by_step)}."
            )
    return candidates[max(candidates)]


def all_checkpoints(path: str | Path) -> list[Path]:
    """Return all checkpoints at ``path``, finished or not.

    If ``path`` is a checkpoint, return only it. Otherwise return the checkpoints in the folder or run.

    Raises:
        ValueError: no checkpoint exists.
    """
    path = Path(path)
    # An unfinished checkpoint has no manifest, so its name must tell.
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        return [path]
    folders = [path / CHECKPOINTS, path / BEST] if _is_run(path) else [path]
    checkpoints = [
        path_in_folder
        for folder in folders
        for path_in_folder in sorted(folder.glob("step-*"))
        if path_in_folder.is_dir()
    ]
    if not checkpoints:
        raise ValueError(
            f"{path.resolve()} is not a checkpoint and contains none. Pass a folder written by "
            "`meshrec train`."
        )
    return checkpoints


def _checkpoints_by_step(path: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    """Return two dicts from step to finished checkpoint.

    For a run, the first dict has the run's latest checkpoints, and the second has its best checkpoints on
    validation data. For any other folder, the first dict has all checkpoints, and the second is empty.
    """
    if not _is_run(path):
        return _finished_checkpoints(path), {}
    return _finished_checkpoints(path / CHECKPOINTS), _finished_checkpoints(path / BEST)


def _is_run(path: Path) -> bool:
    """Return whether a folder is a run folder with checkpoints."""
    return (path / CHECKPOINTS).is_dir() or (path / BEST).is_dir()


def _finished_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the finished checkpoints in a folder by step."""
    by_step: dict[int, Path] = {}
    # Sorted, so that of several spellings of a step the same one wins, whatever order the file system lists.
    for checkpoint in sorted(folder.glob("step-*")):
        if not (checkpoint / MANIFEST).exists():
            continue
        match = _NAME.fullmatch(checkpoint.name)
        if match is None:
            _log.warning("%s is ignored: its name does not end in a step number", checkpoint)
        elif int(match[1]) in by_step:
            _log.warning("%s is ignored: %s has the same step", checkpoint, by_step[int(match[1])])
        else:
            by_step[int(match[1])] = checkpoint
    return by_step
