import os
import subprocess
import sys
from pathlib import Path

SOURCE = str(Path(__file__).parents[3] / "src")

PROGRAM = """
import sys
from multiprocessing import get_context

import torchrec


def name_of(number):
    return f"{number} {torchrec.KeyedJaggedTensor.__module__}"


if __name__ == "__main__":
    with get_context("spawn").Pool(1) as pool:
        print(pool.apply(name_of, (7,)))
"""


def test_processes_that_the_script_spawns_have_the_bridge_too(tmp_path):
    path = tmp_path / "spawns.py"
    path.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "meshrec.compat.torchrec", "--force", str(path)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "7 meshrec.compat.bridge.sparse.keyed_jagged", done.stderr
