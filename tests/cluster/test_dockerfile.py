"""The Dockerfile can be checked without Docker: by its linter, and by what it copies."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def test_all_that_is_copied_is_there():
    copied = [line.split()[1:-1] for line in TEXT.splitlines() if re.match(r"COPY (?!--from)", line)]
    names = [name for each in copied for name in each]
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not set(names) & set(ignored)


def test_the_ports_and_the_user_are_those_of_the_manifests():
    assert "EXPOSE 8080 29500" in TEXT
    assert "USER 1000" in TEXT


def test_the_linter_is_content():
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
