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
    command = list(arguments)
    if command[:1] == ["--force"]:
        os.environ[FORCE] = "1"
        del command[0]
    if not command or command[0].startswith("-"):
        sys.exit(_USAGE)
    if not Path(command[0]).is_file():
        sys.exit(f"{_USAGE}\nthere is no file {command[0]!r}")
    install()
    os.environ[SCRIPT] = str(Path(command[0]).resolve())
    sys.argv[:] = command
    sys.path[0] = str(Path(command[0]).resolve().parent)
    # As a module, not a path: spawned processes import it by name. That import also imports this package,
    # which installs the bridge before the script's own imports run.
    runpy.run_module("meshrec.compat.torchrec.script", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
