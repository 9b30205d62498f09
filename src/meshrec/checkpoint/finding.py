"""Find the checkpoint that a path stands for: a checkpoint, a checkpoint folder, or a run."""

import logging
import re
from pathlib import Path

from meshrec.checkpoint.manifest import MANIFEST

_log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Run subfolder with the last checkpoints, from which training resumes."""
BEST = "best"
"""Run subfolder with the best weights on validation data."""
# Folder names accepted for reading, with any number of digits.
_NAME = re.compile(r"step-([0-9]+)")
# Folder names written by `CheckpointManager`. Only these may be deleted as old checkpoints.
_MANAGED_NAME = re.compile(r"step-([0-9]{10,})")


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
    has no validation data. The refit on all rows (``--final all``) is the run ``PATH/final``.

    Args:
        path: checkpoint, checkpoint folder, or run folder.
        step: return this step's checkpoint instead.
        last: for a run folder, return the last checkpoint instead of the best.

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
