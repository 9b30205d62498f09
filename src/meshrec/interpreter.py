"""New Python interpreters that do not import modules of the current folder.

``python -c`` and ``python -m`` put the current folder first in ``sys.path``, so that a stray ``torch.py`` in
it would run. PYTHONSAFEPATH prevents that from Python 3.11 on, for programs that we do not start ourselves.
"""

import os
import sys
from collections.abc import Sequence

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
# Copied at import: a recipe adds its folder to sys.path later, and its ranks do so themselves, after torch.
_start_path = [path for path in sys.path if path]


def interpreter_arguments(code: str, path: Sequence[str] = _start_path) -> list[str]:
    """Return the arguments of a Python interpreter that runs ``code``, with ``path`` as its ``sys.path``."""
    # Nothing is imported before sys.path is replaced: sys is built in.
    return ["-c", f"import sys; sys.path[:] = {list(path)!r}; {code}"]


def drop_current_folder() -> None:
    """Remove the current folder from ``sys.path`` if ``python -m`` has put it there."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated) and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
        _start_path.pop(0)
