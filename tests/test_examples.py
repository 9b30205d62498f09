import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FIRST = ROOT / "examples" / "first.py"


def test_readme_shows_the_first_example_as_it_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks == [FIRST.read_text()]


def test_first_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.random.fork_rng():
        runpy.run_path(str(FIRST), run_name="__main__")
    output, errors = capsys.readouterr()
    assert errors == ""
    losses = [float(line.split()[-1]) for line in output.splitlines()]
    assert losses[0] > 0.6
    assert losses[-1] < 0.2


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_tables_larger_than_a_process_may_be_train_on_four() -> None:
    example = ROOT / "examples" / "larger_than_memory.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "can't allocate memory" in lines[1]
    losses = [float(line.split()[-1]) for line in lines[2:]]
    assert losses[0] > 0.6
    assert losses[-1] < 0.4


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
