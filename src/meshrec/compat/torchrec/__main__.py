"""Command ``python -m meshrec.compat.torchrec [--force] script.py ARGUMENTS``: run a TorchRec script."""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from meshrec.compat.bridge.finder import FORCE, SCRIPT, install

_USAGE = "usage: python -m meshrec.compat.torchrec [--force] script.py [ARGUMENTS ...]"


def main(arguments: Sequence[str]) -> None:
    """Run a script as ``__main__`` with the remaining arguments.

    Child processes from ``multiprocessing`` also have the bridge.
    """
    rest = list(arguments)
    if rest[:1] == ["--force"]:
        os.environ[FORCE] = "1"
        del rest[0]
    if not rest or rest[0].startswith("-"):
        sys.exit(_USAGE)
    if not Path(rest[0]).is_file():
        sys.exit(f"{_USAGE}\nthere is no file {rest[0]!r}")
    install()
    os.environ[SCRIPT] = str(Path(rest[0]).resolve())
    sys.argv[:] = rest
    sys.path[0] = str(Path(rest[0]).resolve().parent)
    # As a module, not a path: spawned processes import it by name. That import also imports this package,
    # which installs the bridge before the script's own imports run.
    runpy.run_module("meshrec.compat.torchrec.script", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
