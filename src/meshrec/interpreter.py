"""Python processes that do not import modules from the current folder.

``python -c`` and ``python -m`` put the current folder first in ``sys.path``, so a stray ``torch.py`` in this
folder would run. From Python 3.11 on, the environment variable PYTHONSAFEPATH prevents this in all child
processes, also those started by other libraries.
"""

import os
import sys
from collections.abc import Sequence

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
# Copied now, because a recipe adds its folder to sys.path later.
START_PATH = [path for path in sys.path if path]
"""``sys.path`` at the start of this process, without the current folder."""


def interpreter_arguments(code: str, path: Sequence[str]) -> list[str]:
    """Return arguments for a Python interpreter that runs some code with a given ``sys.path``.

    Args:
        code: Python statements.
        path: value for ``sys.path``.
    """
    # sys is built in, so nothing is imported from the current folder before sys.path is replaced.
    return ["-c", f"import sys; sys.path[:] = {list(path)!r}; {code}"]


def drop_current_folder() -> None:
    """Remove the current folder from ``sys.path`` if ``python -m`` has put it first. Call before imports."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated) and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
        START_PATH.pop(0)
