import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = str(Path(__file__).parents[3] / "src")


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": SOURCE, "MESHREC_COMPAT_FORCE": "0"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    path.write_text(
        "import sys, beside, torchrec\n"
        "if __name__ == '__main__':\n"
        "    print(torchrec.EmbeddingBagCollection.__module__, beside.NAME, sys.argv[1:], __file__)\n"
    )
    return str(path)


def test_a_script_runs_with_its_arguments(script):
    done = run("-m", "meshrec.compat.torchrec", "--force", script, "--force", "x")
    expected = f"meshrec.compat.bridge.embeddings beside ['--force', 'x'] {script}"
    assert done.stdout.strip() == expected, done.stderr


def test_one_added_line_is_enough(run_code, script):
    text = Path(script).read_text()
    code = f"__file__ = {script!r}\nimport meshrec.compat.torchrec\n{text}"
    done = run_code(code, "x", cwd=Path(script).parent, MESHREC_COMPAT_FORCE="1")
    assert done.stdout.startswith("meshrec.compat.bridge.embeddings beside ['x']"), done.stderr


def test_the_scripts_error_is_its_own(run_code, tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("import torchrec\nfrom torchrec.distributed import ShardedModule\n")
    code = "import runpy; runpy.run_module('meshrec.compat.torchrec', run_name='__main__', alter_sys=True)"
    done = run_code(code, "--force", path, check=False)
    assert done.returncode == 1
    assert f'File "{path}", line 2' in done.stderr
    assert "Nearest: ShardedEmbeddingBagCollection." in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--force"], ["--help"], ["missing.py"]])
def test_usage(arguments):
    done = run("-m", "meshrec.compat.torchrec", *arguments)
    assert done.returncode == 1
    assert "usage: python -m meshrec.compat.torchrec [--force] script.py" in done.stderr
