"""The rule that finds a checkpoint by a path, shared by the command line and ``load``."""

import logging
import re
from pathlib import Path

from meshrec.checkpoint.manifest import MANIFEST

_log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Subfolder of a run for the checkpoints of its last steps, from which training can continue."""
BEST = "best"
"""Subfolder of a run for the weights that were best on validation data."""
_NAME = re.compile(r"step-([0-9]+)")


def find_checkpoint(path: str | Path, *, step: int | None = None, last: bool = False) -> Path:
    """Return the finished checkpoint that ``path`` stands for.

    A checkpoint stands for itself, and a folder of checkpoints for its newest one. A run stands for the
    weights that it reports: the best on its validation data, or, without such data, the last.

    Args:
        path: a checkpoint, a folder of checkpoints, or a run's folder.
        step: use the checkpoint of this step instead.
        last: use a run's last checkpoint instead of its best one.

    Raises:
        ValueError: there is no such checkpoint; the error lists the steps that exist.
    """
    path = Path(path)
    if (path / MANIFEST).exists() and step is None:
        return path
    last_steps, best = _folders(path)
    found = {**best, **last_steps}
    if not found:
        raise ValueError(
            f"{path.resolve()} holds no finished checkpoint. Name a checkpoint, a folder of them, or a run."
        )
    if step is not None:
        if step not in found:
            raise ValueError(
                f"{path} holds no finished checkpoint of step {step}; there are {sorted(found)}."
            )
        return found[step]
    chosen = last_steps if (last and last_steps) or not best else best
    return chosen[max(chosen)]


def all_checkpoints(path: str | Path) -> list[Path]:
    """Return all checkpoints at ``path``, finished or not: itself, or those of a folder or a run.

    Raises:
        ValueError: there is none.
    """
    path = Path(path)
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        return [path]
    folders = [path / CHECKPOINTS, path / BEST] if _is_run(path) else [path]
    found = [each for folder in folders for each in sorted(folder.glob("step-*")) if each.is_dir()]
    if not found:
        raise ValueError(
            f"{path.resolve()} is no checkpoint, and holds none. Name a folder that `meshrec train` wrote."
        )
    return found


def _folders(path: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    """Return the finished checkpoints by step: those of the last steps, and the best ones."""
    if not _is_run(path):
        return _finished(path), {}
    return _finished(path / CHECKPOINTS), _finished(path / BEST)


def _is_run(path: Path) -> bool:
    return (path / CHECKPOINTS).is_dir() or (path / BEST).is_dir()


def _finished(folder: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for each in sorted(folder.glob("step-*")):
        if not (each / MANIFEST).exists():
            continue
        match = _NAME.fullmatch(each.name)
        if match is None:
            _log.warning("%s is passed over: its name does not end in the number of a step", each)
        elif int(match[1]) in found:
            _log.warning("%s is passed over: %s is of the same step", each, found[int(match[1])])
        else:
            found[int(match[1])] = each
    return found
