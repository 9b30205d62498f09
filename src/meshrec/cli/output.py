"""Checks of output files before the work."""

from pathlib import Path


def check_output(path: Path | None, *, force: bool, option: str = "--out") -> None:
    """Raise ValueError if the file cannot be written. Commands call this before the work, not after it.

    Args:
        path: the file.
        force: whether it may replace one that exists.
        option: the option that names it.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file to write in it.")
    if path.exists() and not force:
        raise ValueError(f"{path} is there already; name another {option}, or replace it: --force.")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
