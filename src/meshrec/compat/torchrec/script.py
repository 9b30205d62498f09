"""The script that ``python -m meshrec.compat.torchrec`` runs, as a module that other processes can import."""

import os
from pathlib import Path

from meshrec.compat.bridge.finder import SCRIPT

if __name__ in ("__main__", "__mp_main__"):
    __file__ = os.environ[SCRIPT]
    exec(compile(Path(__file__).read_bytes(), __file__, "exec"), globals())
