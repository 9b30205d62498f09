"""Files that a command is to write."""

from pathlib import Path


def check_output(path: Path | None) -> None:
    """ValueError where no such file can be written: before the work, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file to write in it.")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
