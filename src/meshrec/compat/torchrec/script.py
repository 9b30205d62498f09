"""Wrapper module for the script of ``python -m meshrec.compat.torchrec``, importable by child processes."""

import os
from pathlib import Path

from meshrec.compat.bridge.finder import SCRIPT

# multiprocessing imports the main module under the second name in spawned processes.
if __name__ in ("__main__", "__mp_main__"):
    __file__ = os.environ[SCRIPT]
    exec(compile(Path(__file__).read_bytes(), __file__, "exec"), globals())
