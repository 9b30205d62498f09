"""The command ``python -m meshrec.compat.torchrec [--force] script.py ARGUMENTS``, which runs a TorchRec
script.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from meshrec.compat.bridge.finder import FORCE, SCRIPT, install

_USAGE = "usage: python -m meshrec.compat.torchrec [--force] script.py [ARGUMENTS ...]"


def main(arguments: Sequence[str]) -> None:
    """Run the script that ``arguments`` names as ``__main__``, with the rest of them.

    Processes that it starts with ``multiprocessing`` get the bridge as well.
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
    # A module rather than a path: processes that multiprocessing spawns import it by name, and with it this
    # package, which installs the bridge there before the script's own imports run.
    runpy.run_module("meshrec.compat.torchrec.script", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
