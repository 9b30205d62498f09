import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = ROOT / "examples" / "first.py"


def test_readme_shows_the_first_example_as_it_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks == [FIRST.read_text()]


def test_first_example_learns() -> None:
    done = subprocess.run([sys.executable, str(FIRST)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert losses[0] > 0.6
    assert losses[-1] < 0.2
